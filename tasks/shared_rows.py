"""Rows of the source that several target files take columns of: read once, kept until all have passed.

A row-parallel weight that is cut further has in each row of a source file the columns of several target parts. The
files of these parts are made side by side, a window of each in turn; so what the first one reads is kept for the
others. Rejected: handing the columns on through Ray's object store: twice the copying, and no bound on what waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tasks.gather import SCRATCH_BYTES, Bytes, Rows, Whole
from tasks.reader_pool import ReaderPool

# Rows longer than this are read by each file for itself: reading a part of one is a large request already.
_LONGEST_ROW_BYTES = SCRATCH_BYTES // 4


def share_rows(all_rows: Sequence[Rows]) -> list[Rows]:
    """Tell the segments of several files which whole rows they are of, where others take parts of these too."""
    segments = [
        (int(rows.file[at]), int(rows.source_stride[at]), int(rows.source_start[at]), number, int(at))
        for number, rows in enumerate(all_rows)
        for at in np.flatnonzero((rows.num_runs > 1) & (rows.source_stride <= _LONGEST_ROW_BYTES))
    ]
    wholes: list[dict[int, Whole]] = [{} for _ in all_rows]
    cluster: list[tuple[int, int, int, int, int]] = []
    end = 0
    for segment in sorted(segments):
        file, stride, start, number, at = segment
        if cluster and (file, stride) == cluster[0][:2] and start < end:
            end = max(end, _end(all_rows[number], at))
        else:
            _note(cluster, end, all_rows, wholes)
            cluster, end = [], _end(all_rows[number], at)
        cluster.append(segment)
    _note(cluster, end, all_rows, wholes)
    return [replace(rows, wholes=found) for rows, found in zip(all_rows, wholes, strict=True)]


def _end(rows: Rows, at: int) -> int:
    last = int(rows.num_runs[at] - 1) * int(rows.source_stride[at])
    return int(rows.source_start[at]) + last + int(rows.source_run[at])


def _note(
    cluster: Sequence[tuple[int, int, int, int, int]],
    end: int,
    all_rows: Sequence[Rows],
    wholes: list[dict[int, Whole]],
) -> None:
    if len(cluster) < 2:
        return
    base = cluster[0][2]
    width = max(
        (start - base) % stride + int(all_rows[number].source_run[at]) for _, stride, start, number, at in cluster
    )
    for _, _, _, number, at in cluster:
        wholes[number][at] = Whole(base, end, width)


@dataclass(frozen=True, slots=True)
class _Kept:
    file: int
    base: int
    stride: int
    first: int
    count: int
    at: int
    "where its bytes are in the ring"
    length: int


class RowReader:
    """Reads whole rows, and keeps the last of them in a buffer of fixed size; for one thread."""

    def __init__(self, readers: ReaderPool, capacity_bytes: int) -> None:
        self._readers = readers
        self._ring: Bytes = np.empty(capacity_bytes, np.uint8)
        self._free = 0
        self._kept: list[_Kept] = []

    def rows(self, file: int, whole: Whole, stride: int, first: int, count: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Return bytes that begin with row `first` of a block, and how many rows they hold: at least one."""
        for kept in reversed(self._kept):
            if (kept.file, kept.base, kept.stride) == (
                file,
                whole.base,
                stride,
            ) and kept.first <= first < kept.first + kept.count:
                skipped = (first - kept.first) * stride
                view = self._ring[kept.at + skipped : kept.at + kept.length]
                return view, min(count, kept.first + kept.count - first)
        count = min(count, max(1, (SCRATCH_BYTES - whole.width) // stride + 1))
        begin = whole.base + first * stride
        length = min(begin + (count - 1) * stride + whole.width, whole.end) - begin
        view = self._room(length)
        self._readers.read_into(file, begin, view.data)
        self._kept.append(_Kept(file, whole.base, stride, first, count, self._free - length, length))
        return view, count

    def _room(self, length: int) -> Bytes:
        """Take the next bytes of the ring, and forget what was there."""
        begin = self._free if self._free + length <= len(self._ring) else 0
        end = self._free = begin + length
        self._kept = [kept for kept in self._kept if kept.at + kept.length <= begin or kept.at >= end]
        return self._ring[begin:end]
