"""Looks at the machines while nothing finishes: Ray tells nobody that nothing can run, nor that a task is gone.

A machine that falls silent, but closes no connection, takes tasks with it of which Ray never says a word: what it was
given, and what it was asked to take. Which of them are on that machine only Ray knows. So all that were in flight when
a machine was found gone are begun once more, if nothing has finished for long: at worst one runs twice. What is
submitted later waits for nothing that such a machine was asked, provided that the remote functions are renewed when
one is found gone (`worker.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.machines import Machines, ray_machines
from cluster.resources import TaskResources, check_capacity

# Of silences: what is in flight when a machine goes may be a large file on another one.
_SILENCES_UNTIL_LOST = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the machines has found."""

    has_machine_gone: bool
    "since the look before"
    lost: tuple[Any, ...] = ()
    "what is in flight and to be begun again"
    shortages: tuple[str, ...] = ()
    "why nothing can run, if that is so"


class Silence:
    """Knows when something last finished, and which machines have gone.

    Args:
        seconds: without a finished task, after which it is time to look; after three of them, what may be lost is.
        machines: asked at each look.
        clock: in seconds.
    """

    def __init__(
        self,
        seconds: float,
        *,
        machines: Callable[[], Machines] = ray_machines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._machines = machines
        self._clock = clock
        self._gone: frozenset[str] | None = None
        self._suspects: set[Any] = set()
        self._last_sign = self._last_look = clock()

    def begin(self) -> bool:
        """Begin with nothing in flight; tell whether machines have gone since the last look, if there was one."""
        before, self._gone = self._gone, self._machines().gone
        self._suspects = set()
        self.sign()
        return before is not None and not self._gone <= before

    def sign(self) -> None:
        """Note that something has finished."""
        self._last_sign = self._last_look = self._clock()

    def is_due(self) -> bool:
        """Tell whether it is time to look again."""
        return self._clock() - self._last_look >= self._seconds

    @property
    def seconds(self) -> float:
        """How long nothing has finished."""
        return self._clock() - self._last_sign

    def look(self, in_flight: Collection[Any], resources: Mapping[str, TaskResources]) -> Seen:
        """Look at the machines.

        Args:
            in_flight: all of it, in the order in which it should be begun again.
            resources: that it asks for, by kind.
        """
        self._last_look = self._clock()
        machines = self._machines()
        known = self._gone or frozenset()
        has_machine_gone = not machines.gone <= known
        if has_machine_gone:
            self._suspects.update(in_flight)
        self._gone = known | machines.gone
        shortages = check_capacity(resources, tuple(machines.live.values()))
        # While nothing can run, nothing is begun again: what is suspected stays so until there are machines.
        if shortages or self.seconds < _SILENCES_UNTIL_LOST * self._seconds:
            return Seen(has_machine_gone, shortages=shortages)
        lost = tuple(each for each in in_flight if each in self._suspects)
        self._suspects.clear()
        return Seen(has_machine_gone, lost)
