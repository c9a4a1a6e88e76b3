"""The yardstick: `cp` of the same bytes, and what every measurement needs before it may begin."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

_BLOCK_BYTES = 4 << 20


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
