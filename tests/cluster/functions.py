"""Functions that run as nodes, importable on workers. Marker files count attempts across processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np


class TransientError(Exception):
    """What a policy names as retryable."""


class SubTransientError(TransientError):
    """A subclass, raised as one that cannot travel: pickling calls its class with too few arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class LockHolderError(Exception):
    """Cannot be pickled at all."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def echo(*values: object) -> tuple[object, object]:
    return values, values


def nothing(*_values: object) -> tuple[object, object]:
    return None, None


def whoami(*_values: object) -> tuple[object, object]:
    return os.getpid(), None


def host(seconds: float, *_values: object) -> tuple[object, object]:
    import ray  # not earlier: Ray reads its settings when it is imported

    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id(), None


def counted(directory: str, name: str, size: int = 8, seconds: float = 0.0) -> tuple[object, object]:
    """Return how often this was called, and an array of `size` bytes that stays in the object store when large."""
    time.sleep(seconds)
    return _attempt(directory, name), np.full(size, 7, np.uint8)


def total(*arrays: np.ndarray) -> tuple[object, object]:
    return sum(int(array.sum()) for array in arrays), None


def crash_once(directory: str, name: str) -> tuple[object, object]:
    attempt = _attempt(directory, name)
    if attempt == 1:
        os._exit(1)
    return attempt, None


def crash(*_values: object) -> tuple[object, object]:
    os._exit(1)


def raise_until(directory: str, name: str, attempt_that_works: int, error: str) -> tuple[object, object]:
    attempt = _attempt(directory, name)
    if attempt < attempt_that_works:
        raise {
            "transient": TransientError("come again"),
            "subclass": SubTransientError("come", "again"),
            "value": ValueError("the file is bad"),
            "lock": LockHolderError("holds a lock"),
        }[error]
    return attempt, None


def sleep_and_mark(directory: str, name: str, seconds: float) -> tuple[object, object]:
    """Sleep in small steps, and leave a file named `name` only if nobody interrupts."""
    Path(directory, f"{name}.started").touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.02)
    Path(directory, name).touch()
    return name, None


def not_a_pair() -> tuple[object, object]:
    return "just one"  # type: ignore[return-value]


def _attempt(directory: str, name: str) -> int:
    """Count this call, atomically also between processes."""
    attempt = 1
    while True:
        try:
            Path(directory, f"{name}.{attempt}").touch(exist_ok=False)
        except FileExistsError:
            attempt += 1
        else:
            return attempt


def deaf_and_mark(directory: str, name: str, seconds: float) -> tuple[object, object]:
    """Take no notice of a cancellation, as a long call into C does."""
    (Path(directory) / f"{name}.started").touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(end - time.monotonic())
        except KeyboardInterrupt:
            continue
    (Path(directory) / name).touch()
    return None, None


def starve(hunger: int, *_values: object) -> tuple[object, object]:
    """Be killed for memory, as Ray tells it, unless asked to take little."""
    from ray.exceptions import OutOfMemoryError

    if hunger > 1:
        raise OutOfMemoryError("killed to keep the machine alive")
    return hunger, None


def devour(num_bytes: int, *_values: object) -> tuple[object, object]:
    """Take memory and hold it for longer than Ray waits."""
    taken = np.ones(num_bytes, np.uint8)
    time.sleep(20.0 if num_bytes > 1 << 30 else 0.0)
    return int(taken[-1]) * num_bytes, None
