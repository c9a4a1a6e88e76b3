"""Runs the tool: inside one Ray session, so that start-up stands apart, and as the command that people call."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cluster.dag import Node
from cluster.failures import RetryPolicy
from cluster.loop import Execution
from cluster.resources import default_resources
from pipeline import nodes
from pipeline.discovery import discover
from pipeline.driver import execute
from pipeline.messages import Progress
from pipeline.options import Request
from tests.benchmarks.memory import peak_bytes, tell_memory

MEMORY_BYTES = 64 << 20
_TASKS = ("unflatten_seconds", "regroup_seconds", "write_seconds")
_TELL = "tell_memory"
# The peak is read from outside, and never falls: only what comes in the last moment is missed.
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do with the source."""

    name: str
    mp: int
    dp: int
    flat: bool

    def options(self) -> list[str]:
        layout = "flat" if self.flat else "unflat"
        return ["--mp", str(self.mp), "--dp", str(self.dp), "--layout", layout, "--state", "drop"]


JOBS = (
    Job("mp2 x dp4 flat -> mp2 x dp3 flat", 2, 3, True),
    Job("mp2 x dp4 flat -> mp4 x dp2 flat", 4, 2, True),
    Job("mp2 x dp4 flat -> 1x1 unflat", 1, 1, False),
    Job("mp2 x dp4 flat -> mp8 unflat", 8, 1, False),
)


@contextmanager
def execution() -> Iterator[Execution]:
    """Yield a fresh execution in the Ray that runs; its workers live on from one to the next."""
    resources = {**default_resources(MEMORY_BYTES)}
    resources[_TELL] = resources[nodes.WRITE]
    functions = {**nodes.FUNCTIONS, _TELL: tell_memory}
    with Execution(functions, resources, max_in_flight=64, retry=RetryPolicy(()), stop=threading.Event()) as made:
        yield made


def run_tasks(job: Job, source: Path, target: Path, *, durable: bool) -> tuple[float, Mapping[str, Any]]:
    """Run the three kinds of tasks as the driver does; return the seconds that these took, and the result."""
    request = Request(
        str(source),
        str(target),
        mp=job.mp,
        dp=job.dp,
        flat=job.flat,
        keep_state=False,
        memory_bytes=MEMORY_BYTES,
        durable=durable,
    )
    with execution() as made:
        result = execute(request, discover(request.source), made, Progress())
    return sum(result[name] for name in _TASKS), result


def worker_peaks(num_workers: int, *, with_imports: bool) -> dict[int, int]:
    """Return the peak memory of each worker, by process."""
    with execution() as made:
        found: dict[int, int] = {}
        for attempt in range(20):
            asked = [Node(f"{attempt} {number}", _TELL, (with_imports,)) for number in range(num_workers * 2)]
            found.update(cast("Iterable[tuple[int, int]]", made.run(asked).values()))
            if len(found) >= num_workers:
                break
        return found


def run_command(job: Job, source: Path, target: Path) -> tuple[float, Mapping[str, Any]]:
    """Run the command, Ray's start and stop included; return its seconds and its result."""
    seconds, result, _ = command([str(source), str(target), *job.options()])
    return seconds, result


def command(arguments: list[str]) -> tuple[float, Mapping[str, Any], int]:
    """Run `python -m pipeline.reshard`; return its seconds, its result, and the peak memory of its own process."""
    began = time.monotonic()
    words = [sys.executable, "-m", "pipeline.reshard", *arguments, "--json"]
    peak = 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(words, stdout=output, stderr=messages)
        while process.poll() is None:
            with suppress(OSError, StopIteration):
                peak = max(peak, peak_bytes(process.pid))
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - began
        output.seek(0)
        messages.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} failed with {process.returncode}:\n{messages.read()}")
        return seconds, json.load(output), peak
