"""Starting, joining and reusing Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.resources import TaskResources
from cluster.session import Session, ray_session

ROOT = Path(__file__).resolve().parents[2]

# Run from a foreign directory, with warnings as errors, by a script that reaches the project through sys.path alone.
LOCAL_SESSION = """
import json, os, socket, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import psutil
from cluster.dag import Node
from cluster.loop import Execution
from cluster.resources import TaskResources
from cluster.session import ray_session
import outside

before = dict(os.environ)
with ray_session(None, num_cpus=1, python_path=[sys.argv[1], sys.argv[2]], environment={"GIVEN": "1"}) as session:
    import ray
    changed = {name for name in {**before, **os.environ} if os.environ.get(name) != before.get(name)}
    changed -= {"PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_CLIENT_MODE"}  # Ray's own doing
    with Execution({"outside": outside.function}, {"outside": TaskResources()}) as execution:
        seen = execution.run([Node("a", "outside")])["a"]
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in mine]
    open_to = {c.laddr.ip.removeprefix("::ffff:") for c in listening}
    result = {"is_local": session.is_local, "seen": seen, "changed": sorted(changed), "open_to": sorted(open_to)}
result["left_running"] = ray.is_initialized()
print(json.dumps(result))
"""

OUTSIDE = """
import os

def function():
    return {name: os.environ.get(name) for name in ("GIVEN", "AWS_REGION", "FSSPEC_S3_ANON")}, None
"""


def test_a_local_session_works_from_any_directory_and_leaves_nothing(tmp_path: Path) -> None:
    modules, elsewhere = tmp_path / "modules", tmp_path / "elsewhere"
    modules.mkdir()
    elsewhere.mkdir()
    (modules / "outside.py").write_text(OUTSIDE)
    (elsewhere / "script.py").write_text(LOCAL_SESSION)
    clean = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py", str(ROOT), str(modules)],
        cwd=elsewhere,
        env={**clean, "AWS_REGION": "us-east-1", "FSSPEC_S3_ANON": "true"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "is_local": True,
        "seen": {"GIVEN": "1", "AWS_REGION": "us-east-1", "FSSPEC_S3_ANON": "true"},
        "changed": [],
        "open_to": ["127.0.0.1"],
        "left_running": False,
    }
    assert done.stderr == ""


def test_a_session_tells_its_machines(local_ray: Session) -> None:
    (node,) = local_ray.nodes()
    assert node["CPU"] == 2
    assert local_ray.num_workers(TaskResources(num_cpus=0.5)) == 4


def test_an_initialised_ray_is_reused_and_left_running(local_ray: Session) -> None:
    with ray_session("some-cluster:6379") as session:
        assert not session.is_local
        assert session.nodes() == local_ray.nodes()
    assert local_ray.nodes()


def test_the_ray_client_is_refused_with_the_next_step() -> None:
    code = "from cluster.session import ray_session\nwith ray_session('ray://head:10001'): pass"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "use `ray job submit`" in done.stderr


# Ray's own function for what comes from its processes, and a signal at the moment when Ray's own handler is in force.
RAY_PRINTS = """
import sys
from cluster.session import ray_prints_plainly
import ray
event = {"pid": "raylet", "ip": "", "localhost": "", "lines": ["a node died"]}
with ray_prints_plainly():
    ray._private.worker.print_worker_logs(event, sys.stdout)
print("the result")
"""

STOPPED_WHILE_STARTING = """
import os, signal
from cluster.session import ray_session
import ray
def init(**_options):
    signal.signal(signal.SIGTERM, lambda number, _frame: exit(number))
    os.kill(os.getpid(), signal.SIGTERM)
ray.init = init
try:
    with ray_session("local"):
        print("started")
except KeyboardInterrupt as fault:
    print(fault)
"""


def test_what_ray_prints_goes_to_standard_error_without_colours() -> None:
    done = subprocess.run([sys.executable, "-c", RAY_PRINTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "the result\n"
    assert done.stderr.endswith("(raylet) a node died\n")
    assert "\x1b" not in done.stderr


def test_a_sigterm_while_ray_starts_is_an_interrupt() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_STARTING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "stopped on request while Ray was starting\n", done.stderr
