"""Task: write target shard. Streams one target file, window by window, from ranges of the source.

The file's layout is known before its first byte (tasks/torchfile/archive_writer.py), so each byte goes from storage
through one window to storage, once, and memory does not depend on the model. The file appears under its name whole or
not at all.

A large file is written in pieces: ranges of units, by tasks of their own, in any order. The file's task then writes the
units that are missing and commits. Missing are always those with a CRC32 of bytes that several pieces made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from tasks import storage
from tasks.checksums import Ledger, Range, Trail
from tasks.convert import load_libraries
from tasks.errors import ReshardError
from tasks.faults import reach
from tasks.file_stream import Body, FileStream, stream_units
from tasks.gather import SCRATCH_BYTES, Gatherer
from tasks.memory import PeakMemory
from tasks.plan import rows_of_file
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.storage import FileIdentity, PiecesLostError, buffered_bytes, open_pieces, open_writer
from tasks.target import Target
from tasks.target_file import plan_file
from tasks.torchfile.archive_writer import ArchiveLayout
from tasks.write_behind import Put

# Objects of a file (its pickle, configuration and index) beside the buffers; measured 3-9 MiB for 1,200 tensors.
OBJECTS_BYTES = 12 << 20
# Where a file can only be written whole; larger windows were not faster.
WHOLE_UNIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What the driver is told of one written file."""

    url: str
    mp: int
    dp: int
    size_bytes: int
    crc32: int
    "of the whole file"
    version: str
    bytes_read: int
    num_requests: int
    seconds: float
    "of all tasks that wrote it"
    peak_memory_bytes: int
    "beyond the idle worker"
    read_ranges: tuple[Range, ...] = ()
    "what was read of the source, with checksums"
    kept_bytes: int = 0
    "that an earlier run had written"
    kept: bool = False
    "an earlier run had written all of it"


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
class Destination:
    """Where a file goes, and at what cost."""

    url: str
    temporary_directory: str
    memory_bytes: int
    durable: bool
    place: str = ""
    "of a file that is written in pieces (`storage.open_pieces`)"


def write_target_shard(
    source: Source,
    target: Target,
    mp: int,
    dp: int,
    to: Destination,
    table: pa.Table,
    pieces: Sequence[PieceResult] = (),
    *,
    before_commit: Callable[[], None] = lambda: None,
) -> ShardResult:
    """Write the target file (mp, dp), but for its pieces. `table` is its part's plan, as `regroup_mp_slice` made it.

    `before_commit` may still forbid that the file appears, by raising.
    """
    with _work(source, target, mp, dp, to, table) as work:

        def written() -> None:
            reach("file-written", to.url)
            before_commit()

        if to.place:
            identity, crc32 = _complete(work, pieces, written)
        else:
            identity, crc32 = _write_whole(work, written)
    return ShardResult(
        url=to.url,
        mp=mp,
        dp=dp,
        size_bytes=identity.size_bytes,
        crc32=crc32,
        version=identity.version,
        bytes_read=work.readers.bytes_read + sum(piece.bytes_read for piece in pieces),
        num_requests=work.readers.num_requests + sum(piece.num_requests for piece in pieces),
        seconds=work.seconds() + sum(piece.seconds for piece in pieces),
        peak_memory_bytes=max(work.memory.peak_bytes(), *(piece.peak_memory_bytes for piece in pieces), 0),
        read_ranges=(*work.trail.ranges(), *(read for piece in pieces for read in piece.read_ranges)),
        kept_bytes=sum(piece.written_bytes for piece in pieces if piece.kept),
    )


def write_piece(
    source: Source, target: Target, mp: int, dp: int, to: Destination, table: pa.Table, number: int, count: int
) -> PieceResult:
    """Write piece `number` of `count` pieces of the target file (mp, dp), but for what needs other pieces' CRC32s."""
    with _work(source, target, mp, dp, to, table) as work:
        begin, end = piece_span(work.layout.size_bytes, work.unit_bytes, number, count)
        storages = Ledger()
        with open_pieces(to.url, work.layout.size_bytes, place=to.place, durable=to.durable) as writer:
            units = range(begin, end, work.unit_bytes)
            written = work.stream(units, storages, writer.write, since=begin)
            receipts = writer.finish()
        reach("piece-written", to.url)
    return PieceResult(
        size_bytes=work.layout.size_bytes,
        written=written,
        storages=storages.ranges(),
        receipts=receipts,
        bytes_read=work.readers.bytes_read,
        num_requests=work.readers.num_requests,
        seconds=work.seconds(),
        peak_memory_bytes=work.memory.peak_bytes(),
        read_ranges=work.trail.ranges(),
    )


def piece_span(size_bytes: int, unit_bytes: int, number: int, count: int) -> tuple[int, int]:
    """Return the range of a piece: whole units, shared out evenly.

    >>> [piece_span(95, 10, number, 4) for number in range(4)]
    [(0, 20), (20, 50), (50, 70), (70, 95)]
    """
    units = -(-size_bytes // unit_bytes)
    begin, end = (min(units * each // count * unit_bytes, size_bytes) for each in (number, number + 1))
    return begin, end


def projected_memory_bytes(url: str, size_bytes: int, window: int) -> int:
    """Return the most memory that writing a file of this size takes beyond an idle worker."""
    return 2 * window + buffered_bytes(url, size_bytes) + SCRATCH_BYTES + OBJECTS_BYTES


def window_bytes(preferred: int, buffered: int, memory_bytes: int) -> int:
    """Return the window for a budget: the writer's own, or the largest multiple of 64 KiB that the budget allows.

    `buffered` is what the writer holds besides.
    """
    room = (memory_bytes - SCRATCH_BYTES - OBJECTS_BYTES - buffered) // 2  # one is filled while the other is written
    return max(min(preferred, room) >> 16 << 16, 1 << 16)


@dataclass(frozen=True, slots=True)
class _Work:
    """What all ways to write a file need."""

    to: Destination
    layout: ArchiveLayout
    bodies: list[Body]
    readers: ReaderPool
    trail: Trail
    unit_bytes: int
    began: float
    memory: PeakMemory

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def units(self) -> range:
        return range(0, self.layout.size_bytes, self.unit_bytes)

    def stream(self, units: Sequence[int], storages: Ledger, put: Put, *, since: int = 0) -> tuple[Range, ...]:
        """Make units and write those whose CRC32s are known; return these, as ranges of stream 0."""
        window = window_bytes(
            self.unit_bytes, buffered_bytes(self.to.url, self.layout.size_bytes), self.to.memory_bytes
        )
        made = FileStream(self.layout, self.bodies, Gatherer(self.readers), storages)
        return stream_units(
            made, self.layout.size_bytes, units, self.unit_bytes, window, put, since=since, url=self.to.url
        )


@contextmanager
def _work(source: Source, target: Target, mp: int, dp: int, to: Destination, table: pa.Table) -> Iterator[_Work]:
    if target.options.dtype or target.options.moments_dtype:
        load_libraries()  # a library is no part of the budget, which is for what grows with the work
    began, memory, trail = time.monotonic(), PeakMemory(), Trail()
    try:
        with ReaderPool(source.files, trail) as readers:
            layout, bodies = plan_file(source, target, mp, dp, to.url, rows_of_file(table, dp), readers)
            unit = storage.unit_bytes(to.url, layout.size_bytes) or WHOLE_UNIT_BYTES
            yield _Work(to, layout, bodies, readers, trail, unit, began, memory)
    except ReshardError as fault:
        raise _in_file(fault, to.url) from fault


def _write_whole(work: _Work, before_commit: Callable[[], None]) -> tuple[FileIdentity, int]:
    to, size = work.to, work.layout.size_bytes
    with open_writer(
        to.url, size, temporary_directory=to.temporary_directory, durable=to.durable, fenced=True
    ) as writer:
        written = work.stream(work.units(), Ledger(), lambda _, view: writer.write(view))
        before_commit()
        crc32 = _total(written, size)
        return writer.commit(), crc32


def _complete(
    work: _Work, pieces: Sequence[PieceResult], before_commit: Callable[[], None]
) -> tuple[FileIdentity, int]:
    """Write what the pieces have left, and commit; where their work is lost, it is done again here."""
    pieces = [piece for piece in pieces if piece.size_bytes == work.layout.size_bytes]
    receipts = [receipt for piece in pieces for receipt in piece.receipts] if pieces else None
    try:
        if any(piece.published for piece in pieces):
            raise PiecesLostError(work.to.place)
        return _commit_pieces(work, pieces, receipts, before_commit)
    except PiecesLostError:
        adopted = _adopt(work, pieces)
        if adopted is not None:
            return adopted
        storage.drop_pieces(work.to.place)
        return _commit_pieces(work, (), None, before_commit)


def _commit_pieces(
    work: _Work, pieces: Sequence[PieceResult], receipts: Sequence[str] | None, before_commit: Callable[[], None]
) -> tuple[FileIdentity, int]:
    to, size = work.to, work.layout.size_bytes
    with open_pieces(to.url, size, place=to.place, receipts=receipts, durable=to.durable) as writer:
        written = _fill_up(work, pieces, writer.write)
        more = writer.finish()
        before_commit()
        crc32 = _total(written, size)
        return writer.commit((*(receipts or ()), *more)), crc32


def _fill_up(work: _Work, pieces: Sequence[PieceResult], put: Put) -> tuple[Range, ...]:
    """Make the units that no piece has written; return all units."""
    written = [unit for piece in pieces for unit in piece.written]
    there = {begin for _, begin, _, _ in written}
    storages = Ledger(noted for piece in pieces for noted in piece.storages)
    missing = [begin for begin in work.units() if begin not in there]
    return (*written, *work.stream(missing, storages, put))


def _adopt(work: _Work, pieces: Sequence[PieceResult]) -> tuple[FileIdentity, int] | None:
    """Return the file where an attempt that was killed right after its commit has left it, whole."""
    try:
        identity = storage.stat(work.to.url)
    except ReshardError:
        return None
    size = work.layout.size_bytes
    crc32 = _total(_fill_up(work, pieces, lambda *_: None), size)
    return (identity, crc32) if identity.size_bytes == size and storage.checksum(identity) == crc32 else None


def _total(written: Sequence[Range], size_bytes: int) -> int:
    crc32 = Ledger(written).total(0, size_bytes)
    if crc32 is None:
        raise ValueError(f"not all of {size_bytes} bytes were written")
    return crc32


def _in_file(fault: ReshardError, url: str) -> ReshardError:
    """Say which target file was being written."""
    return ReshardError(
        type(problem)(
            problem.kind, problem.reference, problem.message, (*problem.context, f"while writing {url}"), problem.hint
        )
        for problem in fault.problems
    )
