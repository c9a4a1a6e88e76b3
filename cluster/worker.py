"""What surrounds a node's function on a worker, and the remote functions made of the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.failures import call_portably
from cluster.resources import TaskResources


@dataclass(frozen=True, slots=True)
class Report:
    """What the driver fetches of a finished attempt; small."""

    summary: object
    worker: str
    "Ray's id of the machine"
    seconds: float
    "that the function took"


class RemoteFunctions:
    """The functions of a run as Ray calls them.

    Ray asks machines for room once for many tasks: for all that share a remote function and resources, a "scheduling
    class". When it has asked a machine that falls silent, it waits for the answer even after the machine is declared
    dead, and asks no other for as many tasks as it has open questions: those wait for ever beside idle machines. Tasks
    of a new remote function are a new class, of which nothing has been asked yet: hence `renew`.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., tuple[object, object]]], resources: Mapping[str, TaskResources]
    ) -> None:
        self._functions = dict(functions)
        self._resources = {kind: resources[kind] for kind in functions}
        self._remotes: dict[str, Any] = {}
        self.renew()

    @property
    def kinds(self) -> Collection[str]:
        """The kinds that there is a function for."""
        return self._functions.keys()

    def resources(self, kinds: Iterable[str]) -> dict[str, TaskResources]:
        """Return what tasks of these kinds ask for, by kind."""
        return {kind: self._resources[kind] for kind in sorted(set(kinds))}

    def submit(self, kind: str, values: Iterable[object]) -> tuple[Any, Any]:
        """Return references to the Report and to the payload."""
        summary_ref, payload_ref = self._remotes[kind].remote(*values)
        return summary_ref, payload_ref

    def renew(self) -> None:
        """Make what is submitted from now on independent of what Ray still waits for."""
        self._remotes = {
            kind: _remote_function(kind, function, self._resources[kind]) for kind, function in self._functions.items()
        }


def _remote_function(kind: str, function: Callable[..., tuple[object, object]], resources: TaskResources) -> Any:
    """Return the remote function of a kind, returning (Report, payload) as two objects.

    Not to be called for each node: a fresh one for each of 1,000 takes 5 s instead of 0.4 s. All nodes of a kind
    carry the kind as their name, since Ray's tables and metrics group by name.
    """
    import ray

    def run(*values: object) -> tuple[Report, object]:
        started = time.perf_counter()
        summary, payload = call_portably(function, values)
        worker = ray.get_runtime_context().get_node_id()
        return Report(summary, worker, time.perf_counter() - started), payload

    run.__name__ = run.__qualname__ = kind
    # SPREAD, because a task is mostly one stream from storage and back, and Ray's default fills a machine to half
    # before it turns to the next. A choice by reasoning: on one machine both cost the same, on many it is unmeasured.
    return ray.remote(run).options(
        num_returns=2, max_retries=0, name=kind, scheduling_strategy="SPREAD", **resources.options()
    )
