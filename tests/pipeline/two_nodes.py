"""A program: reshards on a Ray cluster of two nodes on this machine, and prints which of them wrote files."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from ray.cluster_utils import Cluster

from cluster.events import Event, EventKind
from cluster.session import ray_session
from pipeline import driver
from pipeline.messages import Progress
from pipeline.options import Request


def main(source: str, target: str) -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    workers: Counter[str] = Counter()

    class Watching(Progress):
        def observe(self, event: Event) -> None:
            super().observe(event)
            if event.kind is EventKind.FINISHED and event.node_kind == "write_target_shard":
                workers[event.worker] += 1

    driver.Progress = Watching  # type: ignore[misc]
    with ray_session(cluster.address):
        result = driver.run(Request(source, target, mp=2, dp=16, flat=True, keep_state=False))
    cluster.shutdown()
    print(json.dumps({"files": len(result["files"]), "workers": list(workers.values())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
