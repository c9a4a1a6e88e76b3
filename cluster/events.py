"""What an execution tells while it runs; whoever shows progress or keeps a journal listens.

No logging and no printing happen in this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    SUBMITTED = "submitted"
    "handed to Ray; it may still queue there"
    FINISHED = "finished"
    RETRIED = "retried"
    "an attempt failed and another will follow after a pause"
    FAILED = "failed"
    "the last attempt failed: the run ends"
    WAITING = "waiting"
    "nothing has finished for a while and no live machine can run what is in flight"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one node."""

    kind: EventKind
    node_id: str = ""
    "empty in WAITING"
    node_kind: str = ""
    attempt: int = 0
    "from 1, counted over all runs of the node"
    seconds: float = 0.0
    "FINISHED: on the worker; RETRIED and FAILED: since the node was submitted; WAITING: since the last event"
    worker: str = ""
    "FINISHED: Ray's id of the machine"
    message: str = ""
    "RETRIED, FAILED: the cause; WAITING: what is missing"
    summary: object = None
    "FINISHED: what the function returned for the driver"


def ignore(_event: Event) -> None:
    """Listen to nothing."""
