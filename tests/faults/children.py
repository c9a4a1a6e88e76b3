"""Runs of the tool in processes that may be killed, for a tenth of a second each: forked from one that imported it all.

The nodes run in the driver's process, so that a kill at any point is a kill of the driver. Real workers, and kills of
them alone, are in sessions.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from cluster.failures import RetryPolicy
from cluster.inline import InlineExecution
from pipeline import nodes
from pipeline.discovery import discover
from pipeline.driver import execute
from pipeline.messages import Progress, run_command
from pipeline.options import Request
from tasks.faults import VARIABLE
from tasks.storage import TransientStorageError

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.children", "tasks.storage.local", "pyarrow.parquet"])
_TIMEOUT_SECONDS = 60.0


@dataclass
class Child:
    """One run, in work or ended."""

    process: ForkServerProcess
    log: Path

    def wait(self) -> int:
        """Return the exit code: negative for the signal that ended it."""
        self.process.join(_TIMEOUT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"the run did not end: {self.said}")
        return self.process.exitcode

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@dataclass
class Job:
    """One command, to be started as often as it takes."""

    source: Path | str
    target: Path | str
    scratch: Path
    "for what it says, and for the faults planned for it"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> Path:
        folder = self.scratch / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def plan(self, point: str, action: str, count: int | str = 1) -> None:
        (self.faults / f"{point}:{action}:{count}").touch()

    def happened(self, point: str) -> Path:
        return self.faults / f"{point}:happened"

    def start(self) -> Child:
        self.scratch.mkdir(parents=True, exist_ok=True)
        log = self.scratch / f"log-{len(list(self.scratch.glob('log-*')))}"
        log.touch()
        environment = {**self.environment, VARIABLE: str(self.faults)}
        request = Request(str(self.source), str(self.target), **self.options)
        process = _CONTEXT.Process(target=_run, args=(request, environment, log))
        process.start()
        return Child(process, log)

    def run(self) -> tuple[int, str]:
        child = self.start()
        return child.wait(), child.said


def _run(request: Request, environment: Mapping[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("w") as said, redirect_stderr(said), redirect_stdout(said):
        code = run_command(lambda: (_reshard(request), "done"), as_json=True)
    sys.exit(code)


def _reshard(request: Request) -> Mapping[str, Any]:
    progress = Progress()
    retry = RetryPolicy((TransientStorageError,), initial_delay_seconds=0.01)
    with InlineExecution(nodes.FUNCTIONS, retry=retry, observe=progress.observe) as execution:
        result = execute(request, discover(request.source, request.checkpoint), execution, progress)
    return {**result, "retries": progress.retries}
