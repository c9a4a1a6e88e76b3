"""The machines of the cluster, as Ray lists them now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Machines:
    """Ray's ids of all machines that have ever been in the cluster."""

    live: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    "total resources by id, under Ray's names (CPU, GPU, memory in bytes, custom)"
    gone: frozenset[str] = frozenset()
    "declared dead or removed: these stay on Ray's list"


def ray_machines() -> Machines:
    """Ask Ray."""
    import ray

    machines = ray.nodes()
    return Machines(
        {machine["NodeID"]: dict(machine["Resources"]) for machine in machines if machine["Alive"]},
        frozenset(machine["NodeID"] for machine in machines if not machine["Alive"]),
    )
