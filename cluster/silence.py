"""Looks at the machines while nothing finishes: Ray tells nobody that nothing can run, nor that a task is gone.

A machine that falls silent, but closes no connection, takes tasks with it of which Ray never says a word: what it was
given, and what it was asked to take. Which of them are on that machine only Ray knows. So all that were in flight when
a machine was found gone are begun once more, if nothing has finished for long: at worst one runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from cluster.resources import TaskResources, check_capacity

# Of silences: what is in flight when a machine goes may be a large file on another one.
_SILENCES_UNTIL_LOST = 3


class Silence:
    """Knows when something last finished, and which machines have gone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._gone: set[str] = set()
        self._suspects: set[Any] = set()
        self._last_sign = self._last_look = time.monotonic()

    def begin(self) -> None:
        self._gone = _machines()[1]
        self._suspects = set()
        self.sign()

    def sign(self) -> None:
        """Note that something has finished."""
        self._last_sign = self._last_look = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether it is time to look again."""
        return time.monotonic() - self._last_look >= self._seconds

    @property
    def seconds(self) -> float:
        """How long nothing has finished."""
        return time.monotonic() - self._last_sign

    def look(
        self, in_flight: Collection[Any], resources: Mapping[str, TaskResources]
    ) -> tuple[list[Any], tuple[str, ...]]:
        """Return what of that which is in flight went with a machine, and why nothing can run, if that is so."""
        self._last_look = time.monotonic()
        machines, gone = _machines()
        if gone - self._gone:
            self._suspects.update(in_flight)
        self._gone |= gone
        messages = check_capacity(resources, machines)
        lost = []
        # While nothing can run, nothing is begun again: what is suspected stays so until there are machines.
        if not messages and self.seconds >= _SILENCES_UNTIL_LOST * self._seconds:
            lost = [each for each in in_flight if each in self._suspects]
            self._suspects.clear()
        return lost, messages


def _machines() -> tuple[list[Mapping[str, float]], set[str]]:
    """Return the resources of live machines, and the ids of the dead ones: Ray keeps those on its list."""
    import ray

    machines = ray.nodes()
    return (
        [machine["Resources"] for machine in machines if machine["Alive"]],
        {machine["NodeID"] for machine in machines if not machine["Alive"]},
    )
