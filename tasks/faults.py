"""Places where a test may break a run: at every step after which a crash would leave something new behind.

    RESHARD_FAULTS=/tmp/faults python -m pipeline.reshard ...      with an empty file /tmp/faults/window-written:kill:3

The third `reach("window-written")`, counted over all processes of the machine, then kills its process. The environment
variable names a directory, since workers cannot be given other variables between two runs; a file in it is a fault:
POINT:ACTION:COUNT, and each process that gets there counts the name down. With `always` instead of a count, every
process is hit. A fault that happened leaves the file POINT:happened, with the process id in it.

Without the variable, as in production, nothing happens: one look into the environment for each window of megabytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tasks.errors import ErrorKind, error
from tasks.storage.problems import TransientStorageError

VARIABLE = "RESHARD_FAULTS"

WORKER_POINTS = (
    "source-indexed",
    "slice-planned",
    "plan-saved",
    "window-written",
    "file-written",
    "commit-allowed",
    "file-committed",
    "record-written",
)
# Of files that are written in pieces.
PIECE_POINTS = ("piece-written", "piece-recorded")
DRIVER_POINTS = (
    "planned",
    "lease-taken",
    "old-manifest-removed",
    "fence-begun",
    "folder-opened",
    "files-finished",
    "name-taken",
    "manifest-written",
)
POINTS = WORKER_POINTS + PIECE_POINTS + DRIVER_POINTS

# A process that nobody wakes must not outlive its test by much.
_LONGEST_PAUSE_SECONDS = 60.0


def reach(point: str, where: str = "") -> None:
    """Do what a test planned for this point; `where` is what an injected error names.

    kill: SIGKILL to this process. raise: an error that is retried. fail: one that is not. pause: wait until the file
    POINT:happened is removed.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        action = _claim(Path(folder), point)
        if action:
            _act(action, Path(folder, f"{point}:happened"), f"{where or point}: injected at {point}")


def _claim(folder: Path, point: str) -> str:
    """Count a planned fault down; return its action to the one process that reaches zero.

    The name is the count, and renaming it is the lock: who comes too late for a name looks for the next one, so that
    each process counts once however many arrive together.
    """
    while planned := min(folder.glob(f"{point}:*:*"), default=None):
        _, action, count = planned.name.split(":")
        if count == "always":
            return action
        with contextlib.suppress(FileNotFoundError):
            if int(count) > 1:
                planned.rename(folder / f"{point}:{action}:{int(count) - 1}")
                return ""
            planned.unlink()
            return action
    return ""


def _act(action: str, happened: Path, message: str) -> None:
    happened.write_text(str(os.getpid()))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise TransientStorageError(message)
    elif action == "fail":
        raise error(ErrorKind.TASK, "injected", message, hint="nothing: a test asked for it")
    elif action == "pause":
        deadline = time.monotonic() + _LONGEST_PAUSE_SECONDS
        while happened.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
