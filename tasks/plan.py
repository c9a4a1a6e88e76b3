"""Pure. Intersects the source with one model-parallel part of the target: which bytes go where.

The plan of a part is an Arrow table, one row a segment: runs of elements at even distances, in one source file and in
one storage of one target file. Millions of rows stay a few arrays; the table is what is saved, compared and executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.errors import ErrorKind, Problem
from tasks.geometry import Box
from tasks.intersection import Int64, Segments, intersect
from tasks.layout import Piece, Stream, Stretches, stretches
from tasks.source import Source
from tasks.target import Target, target_slice
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES

DTYPES: tuple[str, ...] = tuple(ITEM_SIZE_BYTES)
"A dtype's place here is its code in the table."

SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), metadata={"is": "data-parallel rank of the target file"}),
        pa.field("storage", pa.int32(), metadata={"is": "which storage of that file"}),
        pa.field("storage_offset_bytes", pa.int64(), metadata={"is": "of the first run in the storage"}),
        pa.field("storage_stride_bytes", pa.int64()),
        pa.field("source_file", pa.int32()),
        pa.field("source_offset_bytes", pa.int64(), metadata={"is": "of the first run in the source file"}),
        pa.field("source_stride_bytes", pa.int64()),
        pa.field("run_elements", pa.int64()),
        pa.field("num_runs", pa.int64()),
        pa.field("scale", pa.float64(), metadata={"is": "what the source's numbers are to be multiplied by"}),
        pa.field("source_dtype", pa.int8()),
        pa.field("target_dtype", pa.int8()),
    ]
)


@dataclass(frozen=True, slots=True)
class Copy:
    """One of the places that hold the same box of a tensor."""

    mp: int
    dp: int
    piece: Piece
    stream: Stream

    def stretches(self) -> Stretches:
        return stretches(self.piece, self.stream)


Copies = Mapping[str, Mapping[Box, tuple[Copy, ...]]]


def source_copies(source: Source) -> Copies:
    """List, for each tensor and each box of it, the places that hold it."""
    found: dict[str, dict[Box, list[Copy]]] = {}
    for mp, part in enumerate(source.slices):
        for piece in part.pieces:
            stream = part.streams[piece.stream]
            dp = source.file_ranks[stream.files[0]][1] if len(stream.files) == 1 else 0
            found.setdefault(piece.tensor, {}).setdefault(piece.box, []).append(Copy(mp, dp, piece, stream))
    return {name: {box: tuple(copies) for box, copies in boxes.items()} for name, boxes in found.items()}


def choose_copy(copies: tuple[Copy, ...], mp: int, dp: int, part: int | None) -> Copy:
    """Pick the copy to read: of the part asked for, else of the nearest rank, so that replicas share the load."""
    if len(copies) == 1:
        return copies[0]
    if part is not None:
        copies = tuple(copy for copy in copies if copy.mp == part) or copies
    return min(copies, key=lambda copy: (abs(copy.mp - mp), abs(copy.dp - dp), copy.mp, copy.dp))


def plan_slice(
    source: Source, target: Target, mp: int, *, copies: Copies | None = None, replica_part: int | None = None
) -> tuple[pa.Table, list[Problem]]:
    """Return the plan of one part of the target, sorted by file, storage and offset, and what it fails to cover."""
    copies = source_copies(source) if copies is None else copies
    layout, storages = target_slice(source, target, mp)
    nearest = mp * source.mesh.mp // target.options.mesh.mp
    columns: list[tuple[object, ...]] = []
    problems = []
    for piece in layout.pieces:
        stream = layout.streams[piece.stream]
        cut = stretches(piece, stream)
        storage = storages[piece.stream]
        planned = 0
        for copy, segments in _segments(piece, cut, copies[piece.tensor], nearest, stream.files[0], replica_part):
            planned += segments.num_elements
            columns.append(_columns(segments, cut, stream, storage, copy))
        if planned != piece.box.num_elements:
            message = (
                f"{piece.tensor} of model-parallel part {mp}: {planned} of {piece.box.num_elements} elements planned"
            )
            problems.append(
                Problem(ErrorKind.PLAN, "not-covered", message, hint="please report this: it is a fault here")
            )
    return _table(columns), problems


def _segments(
    piece: Piece, cut: Stretches, boxes: Mapping[Box, tuple[Copy, ...]], mp: int, dp: int, part: int | None
) -> Iterator[tuple[Copy, Segments]]:
    for box, copies in boxes.items():
        if piece.box.intersect(box) is None:
            continue
        copy = choose_copy(copies, mp, dp, part)
        yield copy, intersect(piece.box, cut.starts, box, copy.stretches().starts)


def _columns(segments: Segments, cut: Stretches, stream: Stream, storage: int, copy: Copy) -> tuple[object, ...]:
    source_cut = copy.stretches()
    target_size, source_size = ITEM_SIZE_BYTES[stream.dtype], ITEM_SIZE_BYTES[copy.stream.dtype]
    count = len(segments)
    source_place = source_cut.places[segments.source_stretch]
    source_start = source_cut.offsets[segments.source_stretch] + segments.source_offset
    target_start = cut.offsets[segments.target_stretch] + segments.target_offset
    return (
        np.array(stream.files, np.int32)[cut.places[segments.target_stretch]],
        np.full(count, storage, np.int32),
        target_start * target_size,
        segments.target_stride * target_size,
        np.array(copy.stream.files, np.int32)[source_place],
        np.array(copy.stream.offsets_bytes, np.int64)[source_place] + source_start * source_size,
        segments.source_stride * source_size,
        segments.run,
        segments.num_runs,
        np.array(copy.stream.scales, np.float64)[source_place] if copy.stream.scales else np.ones(count),
        np.full(count, DTYPES.index(copy.stream.dtype), np.int8),
        np.full(count, DTYPES.index(stream.dtype), np.int8),
    )


def _table(columns: list[tuple[object, ...]]) -> pa.Table:
    if not columns:
        return SCHEMA.empty_table()
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.lexsort((joined[2], joined[1], joined[0]))
    return pa.table([pa.array(column[order]) for column in joined], schema=SCHEMA)


def rows_of_file(table: pa.Table, file: int) -> pa.Table:
    """Return the rows of one target file; the table is sorted by file."""
    files = table.column("file").to_numpy()
    begin, end = np.searchsorted(files, [file, file + 1])
    return table.slice(int(begin), int(end - begin))


def bytes_needed(table: pa.Table) -> int:
    """Return how many source bytes the segments hold."""
    sizes = np.array([ITEM_SIZE_BYTES[dtype] for dtype in DTYPES], np.int64)
    elements = table.column("run_elements").to_numpy() * table.column("num_runs").to_numpy()
    return int((elements * sizes[table.column("source_dtype").to_numpy()]).sum())


def span_bytes(table: pa.Table) -> Int64:
    """Return, for each segment, the bytes of the source from its first run's start to its last run's end."""
    sizes = np.array([ITEM_SIZE_BYTES[dtype] for dtype in DTYPES], np.int64)
    run = table.column("run_elements").to_numpy() * sizes[table.column("source_dtype").to_numpy()]
    between = (table.column("num_runs").to_numpy() - 1) * table.column("source_stride_bytes").to_numpy()
    spans: Int64 = run + between
    return spans
