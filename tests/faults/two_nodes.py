"""A program: runs on a cluster of machines of which one dies while a worker there is in the middle of a file.

First a whole machine dies, then another falls silent: its workers, whom Ray believes dead, live on and write.
Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from ray.cluster_utils import Cluster

from cluster.session import ray_session
from pipeline.driver import run
from pipeline.options import Request
from tasks.faults import VARIABLE
from tests.cluster.two_hosts import HEALTH_CHECKS, MEBIBYTE, kill_machine
from tests.faults.targets import OPTIONS, SOURCE

_WAIT_SECONDS = 60.0
# Health checks fail three times, at half a second.
_DECLARED_DEAD_SECONDS = 3.0


class Death(threading.Thread):
    """Waits until a worker pauses in the middle of a file, and kills its machine, or stops the machine's raylet alone.

    A raylet that is stopped, not killed, answers nothing and closes nothing: with a killed one, workers may end too.

    Ray tells the driver that a node is dead, but not that its tasks are, as long as their worker answers: so a zombie
    is let go while the run waits for it.
    """

    def __init__(self, faults: Path, *, silent_only: bool) -> None:
        super().__init__(name="death")
        self._happened = faults / "window-written:happened"
        self._silent_only = silent_only
        self._woken_seconds = 0.0

    def run(self) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (self._happened.exists() and self._happened.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        worker = psutil.Process(int(self._happened.read_text()))
        raylet = worker.parent()
        if self._silent_only:
            raylet.suspend()
            time.sleep(_DECLARED_DEAD_SECONDS)
        else:
            kill_machine(raylet.pid)
        if worker.is_running():
            # The files' clock, which is coarser than the system's.
            self._happened.touch()
            self._woken_seconds = self._happened.stat().st_mtime
        self._happened.unlink()

    def zombie_wrote(self, target: str) -> bool:
        """Tell whether a worker was alive after its machine was dead for Ray, so that it went on with its file.

        It may only have had to rename the file, which changes st_ctime alone.
        """
        return bool(self._woken_seconds) and any(
            path.stat().st_ctime >= self._woken_seconds for path in Path(target).glob("*.pt")
        )


def one_run(faults: Path, target: str, *, silent_only: bool) -> dict[str, object]:
    """Reshard while a machine dies."""
    (faults / "window-written:pause:4").touch()
    death = Death(faults, silent_only=silent_only)
    death.start()
    began = time.monotonic()
    result = run(Request(str(SOURCE), target, **OPTIONS))
    death.join()
    told = {"files": len(result["files"]), "retries": result["retries"], "zombie_wrote": death.zombie_wrote(target)}
    return {**told, "seconds": round(time.monotonic() - began, 1)}


def main(scratch: str, targets: str) -> None:
    """`targets` is the folder of the targets, a path or a URL."""
    faults = Path(scratch, "faults")
    faults.mkdir()
    os.environ[VARIABLE] = str(faults)  # before Ray's processes start, which inherit it
    machine = {"num_cpus": 1, "object_store_memory": 80 * MEBIBYTE}
    # The head runs no tasks: it is the others that die.
    head = {**machine, "num_cpus": 0, "_system_config": HEALTH_CHECKS}
    ray_cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        ray_cluster.add_node(**machine)
    told: dict[str, object] = {}
    try:
        with ray_session(ray_cluster.address):
            told["machine"] = one_run(faults, f"{targets}/machine", silent_only=False)
            ray_cluster.add_node(**machine)
            told["silent"] = one_run(faults, f"{targets}/silent", silent_only=True)
    finally:
        ray_cluster.shutdown()
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
