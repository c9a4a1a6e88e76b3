"""What a worker's memory is: measured beyond the idle process, so that it can be held against the budget."""

from __future__ import annotations

import ctypes
import functools
import resource
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

# Larger pieces of memory are given back to the system when they are freed. Of the C library's own accord this limit
# grows up to 32 MiB with what is freed, and buffers come to lie between small objects, which keep them: a worker then
# takes more with every task (measured: 171 MB above an idle one after 33 runs, and growing).
_GIVEN_BACK_BYTES = 64 << 10
_M_MMAP_THRESHOLD = -3
"of malloc.h"


@functools.cache
def give_memory_back() -> bool:
    """Let this process give back the memory of buffers as soon as they are freed; return whether it is possible."""
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(setting and setting(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES))


class PeakMemory:
    """Measures the most memory that this process takes beyond what it has now.

    Linux can forget the peak of the past, so that a worker's earlier tasks do not count; elsewhere they do.
    """

    def __init__(self) -> None:
        try:
            _CLEAR.write_text("5")
        except OSError:
            self._start = 0
            return
        self._start = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most that there was since the start, less what there was at the start."""
        if not self._start:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, _status_bytes("VmHWM") - self._start)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
