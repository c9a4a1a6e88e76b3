"""What the commands say: messages on stderr, the result alone on stdout, one exit code per class of error."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

from cluster.events import Event, EventKind
from cluster.failures import Interrupted, NodeFailed
from tasks.errors import ErrorKind, ReshardError, error
from tasks.storage import TransientStorageError

# As a shell reports a process that was stopped by SIGINT.
INTERRUPTED = 130
_SECONDS_BETWEEN_LINES = 5.0


def say(text: str) -> None:
    """Tell a person something."""
    print(text, file=sys.stderr, flush=True)


def run_command(command: Callable[[], tuple[Mapping[str, Any], str]], *, as_json: bool) -> int:
    """Run a command that returns (result, the result in words); print it or its error, return the exit code."""
    try:
        # Ray prints to stdout when a worker or machine dies; programs read the result there, and nothing else.
        with redirect_stdout(sys.stderr):
            result, words = command()
    except ReshardError as fault:
        return _failed(fault, as_json)
    except NodeFailed as fault:
        if isinstance(fault.cause, ReshardError):
            return _failed(fault.cause, as_json)
        return _failed_task(fault, as_json)
    except TransientStorageError as fault:
        hint = "mend the storage, or wait until it answers, and run the same command again; what is finished is kept"
        return _failed(error(ErrorKind.TASK, "storage-failed", str(fault), hint=hint), as_json)
    except (Interrupted, KeyboardInterrupt) as fault:
        say(
            f"interrupted: {fault or 'from the keyboard'}\n  next: run the same command again; what is finished is kept"
        )
        return INTERRUPTED
    except Exception:  # noqa: BLE001  the last resort: a fault of ours must still end with its class's code
        say(traceback.format_exc())
        say("error[internal]: a fault of this tool; nothing was published\n  next: please report it with the above")
        return int(ErrorKind.TASK)
    try:
        print(json.dumps(result, indent=1) if as_json else words, flush=True)
    except BrokenPipeError:
        # Whoever reads has seen enough (`| head`); Python must not complain about the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _failed(fault: ReshardError, as_json: bool) -> int:
    say(str(fault))
    if as_json:
        problems = [
            {
                "reference": problem.reference,
                "message": problem.message,
                "context": list(problem.context),
                "hint": problem.hint,
            }
            for problem in fault.problems
        ]
        print(json.dumps({"exit_code": fault.exit_code, "problems": problems}, indent=1), flush=True)
    return fault.exit_code


def _failed_task(fault: NodeFailed, as_json: bool) -> int:
    say(f"error[task-failed]: {fault}\n  next: mend the cause and run the same command again; what is finished is kept")
    if as_json:
        problem = {
            "reference": "task-failed",
            "message": str(fault),
            "context": [],
            "hint": "run the same command again",
        }
        print(json.dumps({"exit_code": int(ErrorKind.TASK), "problems": [problem]}, indent=1), flush=True)
    return int(ErrorKind.TASK)


class Progress:
    """Counts events; tells retries and waiting at once, and how far the run is every few seconds."""

    def __init__(self) -> None:
        self._total = 0
        self._finished = 0
        self._what = ""
        self._last = time.monotonic()
        self.retries = 0

    def begin(self, what: str, total: int) -> None:
        self._what, self._total, self._finished, self._last = what, total, 0, time.monotonic()

    def observe(self, event: Event) -> None:
        if event.kind is EventKind.FINISHED:
            self._finished += 1
        elif event.kind is EventKind.RETRIED:
            self.retries += 1
            say(f"retrying {event.node_id} after attempt {event.attempt}: {event.message}")
        elif event.kind is EventKind.WAITING:
            say(f"waiting: {event.message}")
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            say(f"{self._what}: {self._finished} of {self._total} done")


def size(num_bytes: float) -> str:
    """
    >>> size(1234), size(5_300_000_000), size(999_600)
    ('1.23 kB', '5.3 GB', '1 MB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}" if unit != "bytes" else f"{num_bytes} {unit}"
        num_bytes = num_bytes / 1000
    return f"{num_bytes:.3g} TB"
