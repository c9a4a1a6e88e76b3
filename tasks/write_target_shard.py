"""Task: write target shard. Streams one target file, window by window, from ranges of the source.

The file's layout is known before its first byte (tasks/torchfile/archive_writer.py), so each byte goes from storage
through one window to storage, once, and memory does not depend on the model. The file appears under its name whole or
not at all.

A large file is written in pieces: ranges of units, by tasks of their own, in any order. The file's task then writes the
units that are missing and commits. Missing are always those with a CRC32 of bytes that several pieces made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tasks import storage
from tasks.checksums import Ledger, Range
from tasks.errors import ReshardError
from tasks.faults import reach
from tasks.file_stream import in_turn
from tasks.file_work import Destination, FileWork, naming_file, open_task, plan_work
from tasks.gather import Gatherer
from tasks.source import Source
from tasks.storage import FileIdentity, PiecesLostError, open_pieces, open_writer
from tasks.target import Target
from tasks.write_behind import Put
from tasks.write_pieces import PieceResult


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
    with naming_file(to.url), open_task(source, target) as task:
        work = plan_work(task, mp, dp, to, table)

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
        bytes_read=task.readers.bytes_read + sum(piece.bytes_read for piece in pieces),
        num_requests=task.readers.num_requests + sum(piece.num_requests for piece in pieces),
        seconds=task.seconds() + sum(piece.seconds for piece in pieces),
        peak_memory_bytes=max(task.memory.peak_bytes(), *(piece.peak_memory_bytes for piece in pieces), 0),
        read_ranges=(*task.trail.ranges(), *(read for piece in pieces for read in piece.read_ranges)),
        kept_bytes=sum(piece.written_bytes for piece in pieces if piece.kept),
    )


def _stream(work: FileWork, units: Sequence[int], storages: Ledger, put: Put) -> tuple[Range, ...]:
    """Make units and write those whose CRC32s are known; return these."""
    return in_turn([work.stream(units, storages, put, Gatherer(work.task.readers), work.window_bytes())])[0]


def _write_whole(work: FileWork, before_commit: Callable[[], None]) -> tuple[FileIdentity, int]:
    to, size = work.to, work.layout.size_bytes
    with open_writer(
        to.url, size, temporary_directory=to.temporary_directory, durable=to.durable, fenced=True
    ) as writer:
        written = _stream(work, work.units(), Ledger(), lambda _, view: writer.write(view))
        before_commit()
        crc32 = _total(written, size)
        return writer.commit(), crc32


def _complete(
    work: FileWork, pieces: Sequence[PieceResult], before_commit: Callable[[], None]
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
    work: FileWork, pieces: Sequence[PieceResult], receipts: Sequence[str] | None, before_commit: Callable[[], None]
) -> tuple[FileIdentity, int]:
    to, size = work.to, work.layout.size_bytes
    with open_pieces(to.url, size, place=to.place, receipts=receipts, durable=to.durable) as writer:
        written = _fill_up(work, pieces, writer.write)
        more = writer.finish()
        before_commit()
        crc32 = _total(written, size)
        return writer.commit((*(receipts or ()), *more)), crc32


def _fill_up(work: FileWork, pieces: Sequence[PieceResult], put: Put) -> tuple[Range, ...]:
    """Make the units that no piece has written; return all units."""
    written = [unit for piece in pieces for unit in piece.written]
    there = {begin for _, begin, _, _ in written}
    storages = Ledger(noted for piece in pieces for noted in piece.storages)
    missing = [begin for begin in work.units() if begin not in there]
    return (*written, *_stream(work, missing, storages, put))


def _adopt(work: FileWork, pieces: Sequence[PieceResult]) -> tuple[FileIdentity, int] | None:
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
