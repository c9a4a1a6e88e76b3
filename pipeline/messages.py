"""What the commands say: messages on stderr, the result alone on stdout, one exit code per class of error."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from cluster.events import Event, EventKind
from cluster.failures import Interrupted, NodeFailed, OutOfMemory
from tasks.errors import ErrorKind, Problem, ReshardError
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
        result, words = command()
    except (Interrupted, KeyboardInterrupt) as fault:
        hint = "run the same command again; what is finished is kept"
        return _failed([_problem("interrupted", str(fault) or "stopped from the keyboard", hint)], INTERRUPTED, as_json)
    except Exception as fault:  # noqa: BLE001  the last resort: a fault of ours must still end with its class's code
        problems = problems_of(fault)
        return _failed(problems, int(problems[0].kind), as_json)
    _print(json.dumps(result, indent=1) if as_json else words)
    return 0


class CommandParser(argparse.ArgumentParser):
    """A command line whose errors are told like all others: named, with the next step, as JSON too if asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self._words: Sequence[str] = ()

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Parse words, or those of the process."""
        self._words = sys.argv[1:] if words is None else words
        return self.parse_args(self._words)

    def error(self, message: str) -> NoReturn:
        problem = Problem(ErrorKind.USAGE, "usage", message, hint=f"{self.prog} --help")
        sys.exit(_failed([problem], int(ErrorKind.USAGE), "--json" in self._words))


def problems_of(fault: Exception) -> Sequence[Problem]:
    """Say what an exception means to a person; what is not foreseen is shown with its traceback."""
    cause = fault.cause if isinstance(fault, NodeFailed) else fault
    if isinstance(cause, ReshardError):
        return cause.problems
    if isinstance(cause, TransientStorageError):
        hint = "check store, network and endpoint, then run the same command again; what is finished is kept"
        return [_problem("storage-unavailable", str(fault), hint)]
    if isinstance(cause, OutOfMemory):
        hint = "pass a smaller --memory, or let fewer tasks share a machine, as with --resources num_cpus=2"
        return [_problem("out-of-memory", str(fault), hint)]
    if isinstance(fault, NodeFailed):
        hint = "mend the cause and run the same command again; what is finished is kept"
        return [_problem("task-failed", str(fault), hint)]
    say("".join(traceback.format_exception(fault)))
    return [
        _problem(
            "internal", f"a fault of this tool: {type(fault).__name__}: {fault}", "please report it with the above"
        )
    ]


def _problem(reference: str, message: str, hint: str) -> Problem:
    return Problem(ErrorKind.TASK, reference, message, hint=hint)


def _failed(problems: Sequence[Problem], exit_code: int, as_json: bool) -> int:
    say("\n".join(str(problem) for problem in problems))
    if as_json:
        told = [
            {
                "reference": problem.reference,
                "message": problem.message,
                "context": list(problem.context),
                "hint": problem.hint,
            }
            for problem in problems
        ]
        _print(json.dumps({"exit_code": exit_code, "problems": told}, indent=1))
    return exit_code


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Whoever reads has seen enough (`| head`); Python must not complain about the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
