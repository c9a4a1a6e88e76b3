"""Measures the tool against `cp`, against the older way, and against its goals, with checkpoints that it makes itself.

    python -m tests.benchmarks.run [--gigabytes 2] [--directory DIR] [--rounds 5] [--json FILE] [--keep]

Needs 3.5 times the gigabytes of free disk, and 4 times of memory for the older way. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.copying import settle
from tests.benchmarks.make_checkpoint import free_bytes, make_checkpoint, make_headers, size_of
from tests.benchmarks.model_shape import OPT_175B, small_shape
from tests.benchmarks.ours import command
from tests.benchmarks.report import as_json, goals, table
from tests.benchmarks.rounds import Measured, measure

_SOURCE_MESH = (2, 4)
_LARGE_MESH = (8, 124)
_LARGE_JOB = ["--mp", "16", "--dp", "64", "--state", "drop", "--dry-run"]


def main() -> int:
    """Make, measure, report and delete; return the exit code."""
    words = _parse()
    words.directory.mkdir(parents=True, exist_ok=True)
    if free_bytes(words.directory) < words.gigabytes * 3.5e9 + 1e9:
        print(f"{words.directory}: too little space for {words.gigabytes:g} GB, copies and results", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="reshard-benchmark-", dir=words.directory))
    try:
        planning = None if words.skip_planning else _plan_large(work)
        size = make_checkpoint(work / "source", small_shape(words.gigabytes), *_SOURCE_MESH)
        settle(work / "source")
        measured = measure(work / "source", work, words.gigabytes, words.rounds)
        measured.bytes["source"] = size
        if planning is not None:
            _add(measured, planning)
        found = goals(measured, None if planning is None else planning[0])
        print(table(measured, found))
        words.json.write_text(json.dumps(as_json(measured, found), indent=1) + "\n")
    finally:
        if not words.keep:
            shutil.rmtree(work)
    return int(not all(goal.is_met for goal in found))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2, help="of the checkpoint that is resharded")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="file for all numbers")
    parser.add_argument("--skip-planning", action="store_true", help="leave out the dry run of OPT-175B")
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoints")
    return parser.parse_args()


def _plan_large(work: Path) -> tuple[float, int, int, int]:
    """Dry-run OPT-175B; return seconds, peak memory, and the source's apparent size and size on disk in bytes."""
    source = work / "large"
    on_disk = make_headers(source, OPT_175B, *_LARGE_MESH)
    seconds, _, peak = command([str(source), str(work / "nowhere"), *_LARGE_JOB])
    apparent = size_of(source)
    shutil.rmtree(source)
    return seconds, peak, apparent, on_disk


def _add(measured: Measured, planning: tuple[float, int, int, int]) -> None:
    seconds, peak, apparent, on_disk = planning
    measured.seconds["dry run of OPT-175B, 992 files"].append(seconds)
    measured.bytes["dry run of OPT-175B"] = peak
    measured.facts["OPT-175B"] = f"{apparent / 1e9:.0f} GB in name, {on_disk / 1e9:.2f} GB on disk"


if __name__ == "__main__":
    sys.exit(main())
