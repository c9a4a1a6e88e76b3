"""Fills windows of a target storage from ranges of the source: the inner loop of all data movement.

Contiguous segments are read straight into the window. Strided ones are read as spans into a scratch buffer, then
copied row by row in one numpy call: one request per span, never one per row. A cast goes through torch, which is
imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from tasks.convert import convert
from tasks.intersection import Int64
from tasks.plan import DTYPES
from tasks.reader_pool import ReaderPool
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES

# Large enough that a span read costs little, small enough to stay in cache (measured flat from 1 to 4 MiB).
SCRATCH_BYTES = 4 << 20

_ITEM_SIZES = np.array([ITEM_SIZE_BYTES[dtype] for dtype in DTYPES], np.int64)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Whole:
    """A block of rows in a source file, of which several target files take columns; in bytes."""

    base: int
    "where the first row begins"
    end: int
    "where the last one ends"
    width: int
    "of a row, up to the last column that is taken; the stride is the segment's"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The segments of one storage, in bytes. A run is `run` bytes in the target, `source_run` in the source."""

    start: Int64
    stride: Int64
    run: Int64
    num_runs: Int64
    file: Int64
    source_start: Int64
    source_stride: Int64
    source_run: Int64
    factor: npt.NDArray[np.float64]
    "what the source's numbers are multiplied by; mostly 1"
    target_scale: float
    "what the target's numbers are to be multiplied by, as the target's objects state it"
    exact: bool
    "a factor must not change a number's value"
    source_dtype: Int64
    "codes, by `plan.DTYPES`"
    target_dtype: str
    wholes: Mapping[int, Whole] = field(default_factory=dict)
    "by segment: those that are better read as whole rows"

    @property
    def end(self) -> Int64:
        return self.start + (self.num_runs - 1) * self.stride + self.run

    @property
    def content_bytes(self) -> int:
        """Where the last element ends: segments leave no gap before it, and padding stands behind it."""
        return int((self.run * self.num_runs).sum())


def rows_of_storages(table: pa.Table, *, keep_scales: bool = True) -> dict[int, Rows]:
    """Group the rows of one target file by storage, joining segments that follow each other on both sides.

    `keep_scales`: numbers with factors keep one; without it they take theirs up.
    """
    columns = {name: np.asarray(table.column(name)) for name in table.column_names}
    columns = {name: column if name == "scale" else column.astype(np.int64) for name, column in columns.items()}
    storages = columns["storage"]
    bounds = np.flatnonzero(np.diff(storages)) + 1
    begins, ends = np.append(0, bounds), np.append(bounds, len(storages))
    return {
        int(storages[begin]): _rows({name: column[begin:end] for name, column in columns.items()}, keep_scales)
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    }


def _rows(columns: dict[str, npt.NDArray[Any]], keep_scales: bool) -> Rows:
    targets = np.unique(columns["target_dtype"])
    if len(targets) != 1:
        raise ValueError(f"one storage is planned to have several dtypes: {targets}")
    source_dtype = columns["source_dtype"]
    run = columns["run_elements"] * _ITEM_SIZES[targets[0]]
    source_run = columns["run_elements"] * _ITEM_SIZES[source_dtype]
    start, source_start, file = columns["storage_offset_bytes"], columns["source_offset_bytes"], columns["source_file"]
    scale = columns["scale"]
    single = columns["num_runs"] == 1
    follows = (
        single[1:]
        & single[:-1]
        & (file[1:] == file[:-1])
        & (scale[1:] == scale[:-1])
        & (source_dtype[1:] == source_dtype[:-1])
        & (start[1:] == start[:-1] + run[:-1])
        & (source_start[1:] == source_start[:-1] + source_run[:-1])
    )
    heads = np.flatnonzero(np.append(True, ~follows))
    # One storage has one scale. Of several, the smallest: the others' numbers grow, so that no small one is lost.
    target_scale = float(scale.min()) if keep_scales else 1.0
    return Rows(
        start=start[heads],
        stride=columns["storage_stride_bytes"][heads],
        run=np.add.reduceat(run, heads),
        num_runs=columns["num_runs"][heads],
        file=file[heads],
        source_start=source_start[heads],
        source_stride=columns["source_stride_bytes"][heads],
        source_run=np.add.reduceat(source_run, heads),
        factor=scale[heads] / target_scale,
        target_scale=target_scale,
        exact=keep_scales,
        source_dtype=source_dtype[heads],
        target_dtype=DTYPES[targets[0]],
    )


class WholeRows(Protocol):
    """Gives whole rows of the source; `tasks/shared_rows.py`."""

    def rows(self, file: int, whole: Whole, stride: int, first: int, count: int) -> tuple[Bytes, int]: ...


class Gatherer:
    """Fills windows; owns the one scratch buffer of its worker."""

    def __init__(
        self, readers: ReaderPool, scratch_bytes: int = SCRATCH_BYTES, whole_rows: WholeRows | None = None
    ) -> None:
        self._readers = readers
        self._whole_rows = whole_rows
        self._scratch_bytes = scratch_bytes
        self._scratch = np.empty(0, np.uint8)

    def read(self, file: int, offset_bytes: int, window: Bytes) -> int | None:
        """Fill a window from one range of a source file; return its CRC32 where the readers make one."""
        return self._readers.read_into(file, offset_bytes, window.data)

    def fill(self, rows: Rows, begin: int, window: Bytes) -> tuple[int, int | None]:
        """Fill the bytes [begin, begin + len(window)) of a storage that the rows cover.

        Return how many those are, and their CRC32 where they were read as they stand in the window, one after another.
        """
        end = begin + len(window)
        filled = 0
        crc: int | None = 0
        for row in map(int, np.flatnonzero((rows.start < end) & (rows.end > begin))):
            if rows.num_runs[row] == 1:
                low, high = max(int(rows.start[row]), begin), min(int(rows.start[row] + rows.run[row]), end)
                more = self._copy_runs(rows, row, 0, low - int(rows.start[row]), high - low, 1, low - begin, window)
                if crc is not None and more is not None and low - begin == filled:
                    crc = isal_zlib.crc32_combine(crc, more, high - low)
                else:
                    crc = None
                filled += high - low
            else:
                filled += self._fill_strided(rows, row, begin, window)
                crc = None
        return filled, crc

    def _fill_strided(self, rows: Rows, row: int, begin: int, window: Bytes) -> int:
        """Split what a window holds of a strided segment into part of a run, whole runs, and part of a run."""
        start, stride, run = int(rows.start[row]), int(rows.stride[row]), int(rows.run[row])
        last_run, end = int(rows.num_runs[row]) - 1, begin + len(window)
        first = min(max((begin - start - run) // stride + 1, 0), last_run)
        final = min((end - 1 - start) // stride, last_run)
        filled = 0
        index = first
        while index <= final:
            low = max(start + index * stride, begin)
            high = min(start + index * stride + run, end)
            if high - low < run:
                if high > low:
                    skipped = low - start - index * stride
                    self._copy_runs(rows, row, index, skipped, high - low, 1, low - begin, window)
                    filled += high - low
                index += 1
                continue
            whole_until = min(final, (end - run - start) // stride)
            span_runs = max(1, (self._scratch_bytes - int(rows.source_run[row])) // int(rows.source_stride[row]) + 1)
            count = min(whole_until - index + 1, span_runs)
            self._copy_runs(rows, row, index, 0, run, count, low - begin, window)
            filled += run * count
            index += count
        return filled

    def _copy_runs(
        self, rows: Rows, row: int, first: int, skipped: int, length: int, count: int, at: int, window: Bytes
    ) -> int | None:
        """Copy `count` runs from the `first` on; of each, `length` bytes behind the `skipped` first ones.

        Return the CRC32 of what was read straight to its place, where the readers make one.
        """
        source_dtype = DTYPES[rows.source_dtype[row]]
        source_size, target_size = ITEM_SIZE_BYTES[source_dtype], ITEM_SIZE_BYTES[rows.target_dtype]
        source_at = int(rows.source_start[row] + first * rows.source_stride[row]) + skipped // target_size * source_size
        source_length = length // target_size * source_size
        source_stride = int(rows.source_stride[row])
        file, stride = int(rows.file[row]), int(rows.stride[row])
        factor = float(rows.factor[row])
        casts = source_dtype != rows.target_dtype or factor != 1
        if self._whole_rows is not None and row in rows.wholes:
            whole = rows.wholes[row]
            before, lead = divmod(int(rows.source_start[row]) - whole.base, source_stride)
            lead += skipped // target_size * source_size
            done = 0
            while done < count:
                span, num_rows = self._whole_rows.rows(file, whole, source_stride, before + first + done, count - done)
                here = np.lib.stride_tricks.as_strided(span[lead:], (num_rows, source_length), (source_stride, 1))
                there = np.lib.stride_tricks.as_strided(window[at + done * stride :], (num_rows, length), (stride, 1))
                _convert(here, source_dtype, there, rows, factor, casts=casts)
                done += num_rows
            return None
        if count == 1 and not casts:
            return self._readers.read_into(file, source_at, window[at : at + length].data)
        if count == 1 and source_length > self._scratch_bytes:
            half = length // target_size // 2 * target_size
            self._copy_runs(rows, row, first, skipped, half, 1, at, window)
            self._copy_runs(rows, row, first, skipped + half, length - half, 1, at + half, window)
            return None
        span = self._room((count - 1) * source_stride + source_length)
        self._readers.read_into(file, source_at, span.data)
        here = np.lib.stride_tricks.as_strided(span, (count, source_length), (source_stride, 1))
        there = np.lib.stride_tricks.as_strided(window[at:], (count, length), (stride, 1))
        _convert(here, source_dtype, there, rows, factor, casts=casts)
        return None

    def _room(self, num_bytes: int) -> Bytes:
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(max(num_bytes, min(self._scratch_bytes, 1 << 16)), np.uint8)
        return self._scratch[:num_bytes]


def _convert(here: Bytes, source_dtype: str, there: Bytes, rows: Rows, factor: float, *, casts: bool) -> None:
    if casts:
        convert(here, source_dtype, there, rows.target_dtype, factor, exact=rows.exact)
    else:
        np.copyto(there, here)
