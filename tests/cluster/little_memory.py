"""A program: a Ray whose machine seems to have two gigabytes left, and a node that takes four. Prints what came of it.

A process of its own, because Ray reads its settings when it starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

GIBIBYTE = 1 << 30


def memory_bytes(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    total = memory_bytes("MemTotal")
    limit = total - memory_bytes("MemAvailable") + 2 * GIBIBYTE
    os.environ.update(RAY_memory_usage_threshold=f"{limit / total:.4f}", RAY_memory_monitor_refresh_ms="100")
    from cluster.dag import Node
    from cluster.failures import NodeFailed, RetryPolicy
    from cluster.loop import Execution
    from cluster.resources import TaskResources
    from cluster.session import ray_session
    from tests.cluster.functions import devour

    told = {}
    with ray_session("local", num_cpus=1, object_store_memory_bytes=80 << 20):
        for name, smaller in (("enough", 1 << 20), ("too little", 4 * GIBIBYTE)):
            with Execution(
                {"devour": devour}, {"devour": TaskResources()}, retry=RetryPolicy(initial_delay_seconds=0.1)
            ) as execution:
                try:
                    told[name] = str(execution.run([Node(name, "devour", (4 * GIBIBYTE,), smaller=(smaller,))])[name])
                except NodeFailed as fault:
                    told[name] = type(fault.cause).__name__
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
