"""A program: two Ray machines on this one, joined as a cluster; one is killed mid-run. Prints what it saw as JSON.

A process of its own, because a process can be in one Ray at a time and the other tests share a local one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.dag import Node
from cluster.events import Event, EventKind
from cluster.failures import RetryPolicy
from cluster.loop import Execution
from cluster.resources import TaskResources
from cluster.session import ray_session
from tests.cluster.functions import counted, host, total

# Death is declared after about 1.5 s instead of 15.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
MEBIBYTE = 1 << 20


def kill_machine(raylet_pid: int) -> None:
    """Kill a raylet and all its workers at the same moment: as a machine does, not as a process does."""
    import psutil  # type: ignore[import-untyped]

    raylet = psutil.Process(raylet_pid)
    family = [raylet, *raylet.children(recursive=True)]
    for process in family:
        process.suspend()
    for process in family:
        process.kill()


def start_machine(ray_cluster: Any, resource: str, **options: object) -> Any:
    return ray_cluster.add_node(num_cpus=1, resources={resource: 1}, object_store_memory=80 * MEBIBYTE, **options)


def shipped(*_values: object) -> tuple[object, object]:
    """Say what the worker has of what the session was to send."""
    import shipped_package  # type: ignore[import-not-found]

    return {"package": shipped_package.NAME, "variable": os.environ.get("SENT_TO_WORKERS")}, None


def both_hosts_run_nodes() -> list[str]:
    with Execution({"host": host}, {"host": TaskResources()}) as execution:
        return sorted({str(one) for one in execution.run([Node(f"{n}", "host", (0.3,)) for n in range(8)]).values()})


def a_machine_dies(ray_cluster: Any, doomed: Any, scratch: str) -> dict[str, object]:
    """Payloads and running nodes die with one of the machines; another with the same label takes its place."""
    events: list[Event] = []
    made: list[str] = []

    def observe(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.FINISHED and event.node_kind == "make":
            made.append(event.node_id)
            if len(made) == 3:
                kill_machine(doomed.all_processes["raylet"][0].process.pid)
                start_machine(ray_cluster, "second")  # in this thread: Ray wants the main one

    resources = {
        "make": TaskResources(num_cpus=0.1, custom=(("second", 0.1),)),
        "slow": TaskResources(num_cpus=0.1, custom=(("second", 0.1),)),
        "sum": TaskResources(num_cpus=0.1, custom=(("first", 0.1),)),
    }
    functions: dict[str, Callable[..., tuple[object, object]]] = {"make": counted, "slow": host, "sum": total}
    makes = [Node(f"make-{n}", "make", (scratch, f"make-{n}", MEBIBYTE), priority=-1) for n in range(3)]
    slow = [Node(f"slow-{n}", "slow", (3.0,)) for n in range(2)]
    needs = tuple(node.id for node in makes)
    with Execution(functions, resources, retry=RetryPolicy(initial_delay_seconds=0.2), observe=observe) as execution:
        execution.run([*makes, *slow])
        sums = execution.run([Node("sum", "sum", needs=needs)])
    return {
        "sum": sums["sum"],
        "makes": sorted(path.name for path in Path(scratch).iterdir() if path.name.startswith("make-")),
        "retried": sorted({event.node_id for event in events if event.kind is EventKind.RETRIED}),
        "attempts_of_sum": max(event.attempt for event in events if event.node_id == "sum"),
    }


def stuck_once(started: str) -> tuple[object, object]:
    """Never return, unless somebody was stuck here before."""
    try:
        with open(started, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return os.getpid(), None
    time.sleep(600)
    return None, None


def a_machine_falls_silent(ray_cluster: Any, scratch: str) -> dict[str, object]:
    """Ray believes the machine dead, but its worker's connection stays open, so nobody says that the node is lost."""
    import psutil

    start_machine(ray_cluster, "second")
    started = Path(scratch, "started")

    def stop_raylet() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.05)
        psutil.Process(int(started.read_text())).parent().suspend()

    events: list[Event] = []
    resources = {"stuck": TaskResources(num_cpus=0.1, custom=(("second", 0.1),))}
    thread = threading.Thread(target=stop_raylet)
    thread.start()
    with Execution({"stuck": stuck_once}, resources, observe=events.append, silence_seconds=1) as execution:
        other = execution.run([Node("stuck", "stuck", (str(started),))])["stuck"]
    thread.join()
    return {
        "elsewhere": other != int(started.read_text()),
        "retries": [event.message for event in events if event.kind is EventKind.RETRIED],
    }


def main(scratch: str, shipped_package: str) -> dict[str, object]:
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster()
    start_machine(ray_cluster, "first", _system_config=HEALTH_CHECKS)
    doomed = start_machine(ray_cluster, "second")
    try:
        with ray_session(
            ray_cluster.address, packages=[shipped_package], environment={"SENT_TO_WORKERS": "yes"}
        ) as session:
            with Execution({"shipped": shipped}, {"shipped": TaskResources()}) as execution:
                seen = execution.run([Node("a", "shipped")])["a"]
            return {
                "is_local": session.is_local,
                "num_workers": session.num_workers(TaskResources()),
                "shipped": seen,
                "hosts": both_hosts_run_nodes(),
                "death": a_machine_dies(ray_cluster, doomed, scratch),
                "silence": a_machine_falls_silent(ray_cluster, scratch),
            }
    finally:
        ray_cluster.shutdown()


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(result) + "\n")
