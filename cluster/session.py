"""Starts a local Ray, or joins a cluster, for the length of a `with`.

    with ray_session(None) as session:           # RAY_ADDRESS if set (as inside `ray job submit`), else a local Ray
        problems = check_capacity(resources, session.nodes())

What workers get to see:

- *Code.* Locally, `python_path` is put on their PYTHONPATH. `ray job submit --working-dir` ships the code itself and
  nothing is added. When joining a cluster in another way, `packages` are uploaded.
- *Environment.* Local workers inherit that of this process, credentials included (AWS_*, FSSPEC_*). Workers of a
  cluster have the environment of their machines: credentials come from there (a role, a mounted file). Nothing is sent
  there but `environment`, which Ray stores and shows in the clear: never put a secret into it.

Three habits of Ray to know: it replaces the SIGTERM handler when it starts, so install yours inside the `with`, and a
SIGTERM before that is a KeyboardInterrupt here; it prints the death of a machine to standard output, in colours, which
`ray_prints_plainly` is for; and it reads at import whether to listen on 127.0.0.1 alone, so a process that imported Ray
before listens on all addresses.
"""

from __future__ import annotations

import io
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from cluster.machines import ray_machines
from cluster.resources import TaskResources, count_slots

# Payloads are small but for blocks of strided cuts, and those are bounded; Ray's default is 30 % of the memory, which
# the tasks need. What does not fit is spilled to disk.
_LOCAL_OBJECT_STORE_BYTES = 256 << 20

# A head on the other side of the world answers within a second.
_CONNECT_SECONDS = 10.0

_PROJECT_ROOT = str(Path(__file__).resolve().parent.parent)

# Read by Ray when it is imported or when it starts its processes. All only where the operator has set nothing.
_LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds every port to 127.0.0.1, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # workers on demand: 2.0 s against 3.4 s to start, one run each
    "RAY_prestart_worker_first_driver": "0",
}

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# Set by Ray's job supervisor; says that the job's own runtime environment is in force.
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class Unreachable(Exception):  # noqa: N818  it says what the cluster is
    """No cluster answers at the address."""


@dataclass(frozen=True, slots=True)
class Session:
    """A Ray that can be used now."""

    is_local: bool
    "started by us, for us"

    def nodes(self) -> tuple[Mapping[str, float], ...]:
        """Return the total resources of each live machine, under Ray's names (CPU, GPU, memory in bytes, custom)."""
        return tuple(ray_machines().live.values())

    def num_workers(self, resources: TaskResources) -> int:
        """Estimate how many tasks run at once, were the cluster ours alone."""
        return count_slots(resources, self.nodes())


@contextmanager
def ray_session(
    address: str | None,
    *,
    num_cpus: int | None = None,
    object_store_memory_bytes: int | None = None,
    python_path: Sequence[str] = (_PROJECT_ROOT,),
    packages: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Session]:
    """Yield a session; shut Ray down afterwards only if this call started or joined it.

    Args:
        address: of a cluster, as host:port or "auto"; "local" for a local Ray; None for RAY_ADDRESS or else a local
            one. A Ray already initialised in this process is used as it is, whatever the other arguments.
        num_cpus, object_store_memory_bytes: of a local Ray; a cluster has its own.
        python_path: directories from which local workers import, next to their own path.
        packages: directories of packages to upload when joining a cluster from outside of a Ray job.
        environment: variables for the workers; no secrets.
    """
    if _is_initialized():
        yield Session(is_local=False)
        return
    target = address or os.environ.get("RAY_ADDRESS") or "local"
    if target.startswith("ray://"):
        raise Unreachable(
            f"{target}: the Ray client passes every call through a proxy and is not supported; "
            "give the address of the cluster itself (host:6379), or use `ray job submit`"
        )
    _check_answers(target)
    try:
        if target == "local":
            _start_local(num_cpus, object_store_memory_bytes, python_path, environment or {})
        else:
            _join(target, packages, environment or {})
    except SystemExit as fault:
        # Ray's own handler of SIGTERM, in force while it starts: what has been started goes down in order.
        _shutdown()
        raise KeyboardInterrupt("stopped on request while Ray was starting") from fault
    try:
        yield Session(is_local=target == "local")
    finally:
        _shutdown()


@contextmanager
def ray_prints_plainly() -> Iterator[None]:
    """Lead what is printed to standard output to standard error, without colours: the former is for a result alone."""
    with redirect_stdout(_PlainErrors()):
        yield


class _PlainErrors(io.TextIOBase):
    def write(self, text: str) -> int:
        sys.stderr.write(_COLOURS.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _check_answers(address: str) -> None:
    """Raise where nothing listens at host:port: Ray itself would try for many minutes, in silence."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as fault:
        raise Unreachable(f"nothing answers at {address}: {fault}") from fault


def _is_initialized() -> bool:
    # Whoever initialised Ray imported it; importing it here would be too early for the local settings.
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _start_local(
    num_cpus: int | None, store_bytes: int | None, python_path: Sequence[str], environment: Mapping[str, str]
) -> None:
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*python_path, *([inherited] if inherited else [])])
    # Ray's processes inherit what is set while they start, so no runtime environment has to be set up.
    with _environment({**_LOCAL_SETTINGS, **dict(os.environ), **environment, "PYTHONPATH": path}), _quiet():
        import ray

        ray.init(
            address="local",  # without it, Ray would join whatever cluster runs on this machine
            num_cpus=num_cpus,
            object_store_memory=store_bytes or _LOCAL_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )


def _join(address: str, packages: Sequence[str], environment: Mapping[str, str]) -> None:
    runtime_env: dict[str, object] = {}
    if environment:
        runtime_env["env_vars"] = dict(environment)
    if packages and _JOB_VARIABLE not in os.environ:
        runtime_env["py_modules"] = list(packages)
    with _quiet():
        import ray

        try:
            ray.init(address=address, runtime_env=runtime_env or None, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as fault:
            raise Unreachable(
                f"{address} answers, but not as a Ray cluster: give the port of its head (6379), not its dashboard"
            ) from fault


def _shutdown() -> None:
    with _quiet():
        import ray

        ray.shutdown()


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if name in wanted})


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's warnings about itself from becoming errors of a caller who turns warnings into errors.

    A precaution: a local start and stop of Ray 2.60 with warnings as errors raised none on a machine without GPUs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\.")
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield
