"""Pure. Cuts the intersection of two boxes at the ends of the stretches that hold them, vectorised.

What comes out are segments: runs at even distances inside one target stretch and one source stretch. There is no Python
object per segment, so a plan of millions of segments stays a few arrays.

Example: a target box held in stretches [0, 5) and [5, 10), a source box held in [0, 7) and [7, 10), both the whole of a
tensor of 10 elements, give the segments [0, 5), [5, 7) and [7, 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tasks.geometry import Box, Lattice, lattices

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Columns, one row a segment: `num_runs` runs of `run` elements each. In elements, in order of the target."""

    target_stretch: Int64
    "index of the stretch of the target box"
    target_offset: Int64
    "of the first run, from the start of that stretch"
    target_stride: Int64
    "from one run to the next"
    source_stretch: Int64
    source_offset: Int64
    source_stride: Int64
    run: Int64
    num_runs: Int64

    def __len__(self) -> int:
        return len(self.run)

    @property
    def num_elements(self) -> int:
        return int((self.run * self.num_runs).sum())


def concatenate(parts: Sequence[Segments]) -> Segments:
    """Join columns of several sets of segments, in order."""
    if len(parts) == 1:
        return parts[0]
    empty = np.zeros(0, np.int64)
    columns = ([getattr(part, field.name) for part in parts] or [empty] for field in fields(Segments))
    return Segments(*(np.concatenate(column) for column in columns))


def intersect(target: Box, target_starts: Int64, source: Box, source_starts: Int64) -> Segments:
    """Cut the intersection of two boxes by stretches.

    `target_starts` and `source_starts` are where each stretch begins in the row-major order of its box, ascending,
    the first 0; each stretch ends where the next begins, the last at the end of the box. Stretches may be empty.

    The result is cached: the layers of a model are alike, so all but the first are looked up.
    """
    return _intersect(target, target_starts.tobytes(), source, source_starts.tobytes())


@lru_cache(maxsize=4096)
def _intersect(target: Box, target_starts: bytes, source: Box, source_starts: bytes) -> Segments:
    starts = np.frombuffer(target_starts, np.int64), np.frombuffer(source_starts, np.int64)
    return concatenate([_cut(lattice, *starts) for lattice in lattices(target, source)])


def _cut(lattice: Lattice, target_starts: Int64, source_starts: Int64) -> Segments:
    run, total = lattice.run, lattice.run * lattice.num_runs
    cuts = np.concatenate(
        [
            np.array([0, total], np.int64),
            _positions(target_starts, lattice.target_offset, lattice.target_stride, run, total),
            _positions(source_starts, lattice.source_offset, lattice.source_stride, run, total),
        ]
    )
    cuts = np.unique(cuts)
    begin, end, num_runs = _whole_rows(cuts[:-1], cuts[1:], run)
    row, column = np.divmod(begin, run)
    target_at = lattice.target_offset + row * lattice.target_stride + column
    source_at = lattice.source_offset + row * lattice.source_stride + column
    # Of several stretches that begin at one place all but the last are empty; 'right' finds the last.
    target_stretch = np.searchsorted(target_starts, target_at, side="right") - 1
    source_stretch = np.searchsorted(source_starts, source_at, side="right") - 1
    return Segments(
        target_stretch=target_stretch,
        target_offset=target_at - target_starts[target_stretch],
        target_stride=np.full(len(begin), lattice.target_stride, np.int64),
        source_stretch=source_stretch,
        source_offset=source_at - source_starts[source_stretch],
        source_stride=np.full(len(begin), lattice.source_stride, np.int64),
        run=(end - begin) // num_runs,
        num_runs=num_runs,
    )


def _positions(starts: Int64, offset: int, stride: int, run: int, total: int) -> Int64:
    """Return where the ends of stretches fall in the lattice's own order; an end between two runs falls at the next."""
    row, column = np.divmod(starts - offset, stride)
    positions: Int64 = np.clip(row * run + np.minimum(column, run), 0, total)
    return positions


def _whole_rows(begin: Int64, end: Int64, run: int) -> tuple[Int64, Int64, Int64]:
    """Split intervals of the lattice's order into the rest of a row, whole rows, and the start of a row."""
    first_row, last_row = -(-begin // run), end // run
    inside = first_row > last_row  # begins and ends within one row
    head_end = np.where(inside, end, np.minimum(first_row * run, end))
    body_end = np.where(inside, end, np.maximum(last_row * run, head_end))
    starts = np.stack([begin, head_end, body_end])
    ends = np.stack([head_end, body_end, end])
    num_runs = np.ones_like(starts)
    num_runs[1] = np.maximum((body_end - head_end) // run, 1)
    keep = ends > starts
    order = np.argsort(starts[keep], kind="stable")
    return starts[keep][order], ends[keep][order], num_runs[keep][order]
