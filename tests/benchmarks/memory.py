"""Memory of processes, as Linux counts it, and functions for workers that tell theirs."""

from __future__ import annotations

import os
from pathlib import Path


def peak_bytes(process: int | None = None) -> int:
    """Return the most that was resident since the program began (not, as getrusage has it, also before exec)."""
    return _status("VmHWM", process)


def _status(field: str, process: int | None) -> int:
    lines = Path(f"/proc/{process or os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def tell_memory(with_imports: bool) -> tuple[tuple[int, int], None]:
    """Run as a node: return this worker's process and its peak; on request after the imports that every node needs."""
    if with_imports:
        import pipeline.nodes  # noqa: F401
    return (os.getpid(), peak_bytes()), None
