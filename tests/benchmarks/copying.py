"""The yardstick: `cp` of the same bytes, and what every measurement needs before it may begin."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")

_BLOCK_BYTES = 4 << 20
# What a virtual machine has given back of its free memory, where its kernel tells it.
_RETURNED_KIB = Path("/sys/module/page_reporting/parameters/reported_kib")
_MOST_TRIES = 8


def settle(source: Path, *targets: Path) -> None:
    """Make equal conditions: no old targets, no bytes waiting for the disk, memory at hand, the source in the cache."""
    for target in targets:
        shutil.rmtree(target, ignore_errors=True)
    os.sync()
    files = sorted(source.glob("*.pt"))
    touch_memory(sum(file.stat().st_size for file in files) * 3 // 2)
    block = bytearray(_BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def undisturbed(prepare: Callable[[], None], work: Callable[[], Result]) -> tuple[Result, int]:
    """Return what `work` does, and how often it was done once more, because the host took memory from it meanwhile.

    Some virtual machines give free memory back to their host every few seconds. What then needs it waits for the host:
    up to twice the time, for cp and for us, whoever runs at that moment.
    """
    for again in range(_MOST_TRIES):
        prepare()
        before = _returned_kib()
        result = work()
        if _returned_kib() == before:
            return result, again
    return result, _MOST_TRIES


def _returned_kib() -> int:
    return int(_RETURNED_KIB.read_text()) if _RETURNED_KIB.exists() else 0


def touch_memory(num_bytes: int) -> None:
    """Touch memory and let it go: a virtual machine gets pages from its host, slowly, when they are first touched."""
    np.empty(num_bytes, np.uint8).fill(1)


def copy(source: Path, target: Path, *, durable: bool) -> float:
    """Copy with `cp`, then, if durable, fsync each file and the directory; return the seconds."""
    target.mkdir(parents=True)
    files = sorted(str(file) for file in source.glob("*.pt"))
    began = time.monotonic()
    subprocess.run(["cp", *files, str(target)], check=True)
    if durable:
        for path in (*sorted(target.iterdir()), target):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.monotonic() - began
