"""Task: write target shard, the pieces of large files. A piece is a range of units; any worker writes it, in any order.

What a piece cannot know are CRC32s of storages that other pieces have made as well: such units are left to the file's
own task (`write_target_shard.py`).

Files that take columns of the same rows of the source are written side by side by one task, so that these rows are read
once (`shared_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa

from tasks.checksums import Ledger, Range
from tasks.faults import reach
from tasks.file_stream import Steps, in_turn
from tasks.file_work import Destination, FileWork, naming_file, open_task, plan_work
from tasks.gather import SCRATCH_BYTES, Gatherer
from tasks.shared_rows import RowReader, share_rows
from tasks.source import Source
from tasks.storage import PieceWriter, open_pieces
from tasks.target import Target


@dataclass(frozen=True, slots=True)
class PieceResult:
    """What the task of a file is told of one of its pieces."""

    size_bytes: int = 0
    "of the file"
    written: tuple[Range, ...] = ()
    "units that are written, as ranges of stream 0"
    storages: tuple[Range, ...] = ()
    "what was made of the file's storages, also in units that are left to the file's task"
    receipts: tuple[str, ...] = ()
    bytes_read: int = 0
    num_requests: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    read_ranges: tuple[Range, ...] = ()
    kept: bool = False
    "an earlier run had written it"
    published: bool = False
    "and it was found in the published file, not in an unfinished one"

    @property
    def written_bytes(self) -> int:
        return sum(length for _, _, length, _ in self.written)


@dataclass(frozen=True, slots=True)
class Member:
    """One of the files of which a task writes pieces."""

    mp: int
    dp: int
    to: Destination
    table: pa.Table
    "its part's plan, as `regroup_mp_slice` made it"


def write_pieces(
    source: Source, target: Target, members: Sequence[Member], number: int, count: int
) -> list[PieceResult]:
    """Write piece `number` of `count` pieces of each of some files, but for what needs other pieces' CRC32s.

    What was read for all of them is told of all, since any of their records may be lost; its cost is told of the first.
    """
    with ExitStack() as stack:
        stack.enter_context(naming_file(members[0].to.url))
        task = stack.enter_context(open_task(source, target))
        works = _sharing([plan_work(task, each.mp, each.dp, each.to, each.table) for each in members])
        window = works[0].window_bytes(len(works))
        shared = RowReader(task.readers, len(works) * window + SCRATCH_BYTES) if len(works) > 1 else None
        gatherer = Gatherer(task.readers, whole_rows=shared)
        opened = [(work, Ledger(), stack.enter_context(_open(work, len(works)))) for work in works]
        steps = [_steps(*each, gatherer, window, number, count) for each in opened]
        results = [
            PieceResult(
                size_bytes=work.layout.size_bytes,
                written=written,
                storages=storages.ranges(),
                receipts=writer.finish(),
                read_ranges=task.trail.ranges(),
            )
            for (work, storages, writer), written in zip(opened, in_turn(steps), strict=True)
        ]
        reach("piece-written", members[0].to.url)
    return [
        replace(
            results[0],
            bytes_read=task.readers.bytes_read,
            num_requests=task.readers.num_requests,
            seconds=task.seconds(),
            peak_memory_bytes=task.memory.peak_bytes(),
        ),
        *results[1:],
    ]


def piece_span(size_bytes: int, unit_bytes: int, number: int, count: int) -> tuple[int, int]:
    """Return the range of a piece: whole units, shared out evenly.

    >>> [piece_span(95, 10, number, 4) for number in range(4)]
    [(0, 20), (20, 50), (50, 70), (70, 95)]
    """
    units = -(-size_bytes // unit_bytes)
    begin, end = (min(units * each // count * unit_bytes, size_bytes) for each in (number, number + 1))
    return begin, end


def _open(work: FileWork, sharing: int) -> PieceWriter:
    to = work.to
    return open_pieces(to.url, work.layout.size_bytes, place=to.place, durable=to.durable, sharing=sharing)


def _steps(
    work: FileWork, storages: Ledger, writer: PieceWriter, gatherer: Gatherer, window: int, number: int, count: int
) -> Steps:
    begin, end = piece_span(work.layout.size_bytes, work.unit_bytes, number, count)
    return work.stream(range(begin, end, work.unit_bytes), storages, writer.write, gatherer, window, since=begin)


def _sharing(works: Sequence[FileWork]) -> list[FileWork]:
    """Tell the storages of files that are written side by side of the rows that they share."""
    if len(works) == 1:
        return list(works)
    planned = [body.rows for work in works for body in work.bodies if body.rows is not None]
    shared = iter(share_rows(planned))
    return [
        replace(work, bodies=[body if body.rows is None else replace(body, rows=next(shared)) for body in work.bodies])
        for work in works
    ]
