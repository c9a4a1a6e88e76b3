"""Task: write target shard. Streams one target file, window by window, from ranges of the source.

The file's layout is known before its first byte (tasks/torchfile/archive_writer.py), so each byte goes from storage
through one window to storage, once, and memory does not depend on the model. The file appears under its name whole or
not at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from tasks.checksums import Range, Trail
from tasks.convert import load_libraries
from tasks.errors import ErrorKind, ReshardError, error
from tasks.faults import reach
from tasks.formats.metaseq_state_reader import number_of
from tasks.formats.metaseq_state_target import holds_optimizer
from tasks.formats.metaseq_target import TargetObjects, make_objects, provider_rank
from tasks.gather import SCRATCH_BYTES, Bytes, Gatherer, Rows, rows_of_storages
from tasks.memory import PeakMemory
from tasks.plan import rows_of_file
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.storage import TargetWriter, basename, buffered_bytes, open_writer
from tasks.target import Target
from tasks.torchfile.archive_writer import ArchiveLayout, archive_name_of, plan_archive
from tasks.torchfile.file_index import open_torch_file
from tasks.torchfile.objects import StorageRef, TensorRef
from tasks.torchfile.pickler import dump_pickle

# Objects of a file (its pickle, configuration and index) beside the buffers; measured 3-9 MiB for 1,200 tensors.
OBJECTS_BYTES = 12 << 20


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
    peak_memory_bytes: int
    "beyond the idle worker"
    read_ranges: tuple[Range, ...] = ()
    "what was read of the source, with checksums"
    kept: bool = False
    "an earlier run had written it"


@dataclass(frozen=True, slots=True)
class Body:
    """Where the bytes of one storage of the target come from."""

    size_bytes: int
    rows: Rows | None = None
    "segments of the plan"
    file: int | None = None
    "or one range of this source file"
    offset_bytes: int = 0
    literal: bytes | None = None
    "or these bytes; without any of the three the storage is padding, or empty"


def write_target_shard(
    source: Source,
    target: Target,
    mp: int,
    dp: int,
    url: str,
    temporary_directory: str,
    memory_bytes: int,
    durable: bool,
    table: pa.Table,
    *,
    before_commit: Callable[[], None] = lambda: None,
) -> ShardResult:
    """Write the target file (mp, dp) to `url`. `table` is its part's plan, as `regroup_mp_slice` hands it on.

    `before_commit` may still forbid that the file appears, by raising.
    """
    if target.options.dtype or target.options.moments_dtype:
        load_libraries()  # a library is no part of the budget, which is for what grows with the work
    began, memory = time.monotonic(), PeakMemory()
    try:
        trail = Trail()
        with ReaderPool(source.files, trail) as readers:
            layout, bodies = plan_file(source, target, mp, dp, url, rows_of_file(table, dp), readers)
            with open_writer(
                url, layout.size_bytes, temporary_directory=temporary_directory, durable=durable
            ) as writer:
                window = window_bytes(writer.window_bytes, buffered_bytes(url, layout.size_bytes), memory_bytes)
                crc32 = _stream(layout, bodies, writer, Gatherer(readers), window, url)
                reach("file-written", url)
                before_commit()
                identity = writer.commit()
    except ReshardError as fault:
        raise _in_file(fault, url) from fault
    return ShardResult(
        url=url,
        mp=mp,
        dp=dp,
        size_bytes=identity.size_bytes,
        crc32=crc32,
        version=identity.version,
        bytes_read=readers.bytes_read,
        num_requests=readers.num_requests,
        seconds=time.monotonic() - began,
        peak_memory_bytes=memory.peak_bytes(),
        read_ranges=trail.ranges(),
    )


def projected_memory_bytes(url: str, size_bytes: int, window: int) -> int:
    """Return the most memory that writing a file of this size takes beyond an idle worker."""
    return 2 * window + buffered_bytes(url, size_bytes) + SCRATCH_BYTES + OBJECTS_BYTES


def window_bytes(preferred: int, buffered: int, memory_bytes: int) -> int:
    """Return the window for a budget: the writer's own, or the largest multiple of 64 KiB that the budget allows.

    `buffered` is what the writer holds besides.
    """
    room = (memory_bytes - SCRATCH_BYTES - OBJECTS_BYTES - buffered) // 2  # one is filled while the other is written
    return max(min(preferred, room) >> 16 << 16, 1 << 16)


def plan_file(
    source: Source, target: Target, mp: int, dp: int, url: str, table: pa.Table, readers: ReaderPool
) -> tuple[ArchiveLayout, list[Body]]:
    """Lay out one target file: its bytes around the storages, and where each storage comes from."""
    rows = rows_of_storages(table, keep_scales=not target.options.moments_dtype)
    origins: dict[StorageRef, tuple[int, int]] = {}

    def objects(number: int) -> Any:
        identity = source.files[number]
        file = open_torch_file(lambda at, size: readers.read(number, at, size), identity.size_bytes, identity.url)
        origins.update({storage: (number, location.offset) for storage, location in file.locations.items()})
        return file.root

    provider = provider_rank(source.mesh, target.options.mesh, mp, dp)
    root = state_root = objects(source.file_number(*provider))
    if source.optimizer is not None and target.options.keep_state and not holds_optimizer(root):
        # Where the state is not sharded, the first rank of the part has all of it.
        state_root = objects(source.optimizer.holders[provider[0]])
    scales = {number: found.target_scale for number, found in rows.items()}

    def number(tensor: TensorRef) -> float:
        at = {tensor.storage: (origins[tensor.storage][1], 0, None)}
        return number_of(tensor, at, lambda offset, size: readers.read(origins[tensor.storage][0], offset, size))

    made = make_objects(root, state_root, source, target, mp=mp, dp=dp, scales=scales, number_of=number)
    pickle_data, storages = dump_pickle(made.root)
    bodies = [_body(storage, made, rows, origins) for storage in storages]
    return plan_archive(archive_name_of(basename(url)), pickle_data, [body.size_bytes for body in bodies]), bodies


def _body(
    storage: StorageRef, made: TargetObjects, rows: Mapping[int, Rows], origins: Mapping[StorageRef, tuple[int, int]]
) -> Body:
    if storage in made.numbers:
        return _planned_body(storage, rows.get(made.numbers[storage]))
    if storage in made.literals:
        return Body(storage.size_bytes, literal=made.literals[storage])
    file, offset = origins[made.copies.get(storage, storage)]
    return Body(storage.size_bytes, None, file, offset)


def _planned_body(storage: StorageRef, rows: Rows | None) -> Body:
    if rows is not None and int(rows.end.max()) > storage.size_bytes:
        raise ValueError(f"the plan writes past the end of a storage of {storage.size_bytes} bytes")
    return Body(storage.size_bytes, rows)


def _stream(
    layout: ArchiveLayout, bodies: list[Body], writer: TargetWriter, gatherer: Gatherer, window: int, url: str
) -> int:
    """Write the file in order; return the CRC32 of all of it."""
    size = min(window, max((body.size_bytes for body in bodies), default=0))
    buffers = itertools.cycle([np.empty(size, np.uint8), np.empty(size, np.uint8)])
    crcs: list[int] = []
    total = 0

    def put(data: bytes) -> None:
        nonlocal total
        behind.write(data)
        total = isal_zlib.crc32(data, total)

    with WriteBehind(writer) as behind:
        put(layout.head)
        for number, body in enumerate(bodies):
            crc = 0
            for begin in range(0, body.size_bytes, window):
                view = next(buffers)[: min(window, body.size_bytes - begin)]
                _fill(body, begin, view, gatherer)
                crc = isal_zlib.crc32(view, crc)
                behind.write(view.data)
                reach("window-written", url)
            total = isal_zlib.crc32_combine(total, crc, body.size_bytes)
            crcs.append(crc)
            if number + 1 < len(bodies):
                put(layout.between(number, crc))
        put(layout.tail(crcs))
    return total


class WriteBehind:
    """Writes one piece while the caller makes the next: a buffer may be used again after the next `write`."""

    def __init__(self, writer: TargetWriter) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(1, "write-behind")
        self._pending: Future[None] | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Wait until the piece before is written, then hand this one over."""
        self._wait()
        self._pending = self._pool.submit(self._writer.write, data)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown(wait=True)


def _fill(body: Body, begin: int, view: Bytes, gatherer: Gatherer) -> None:
    if body.file is not None:
        gatherer.read(body.file, body.offset_bytes + begin, view)
        return
    if body.literal is not None:
        view[:] = np.frombuffer(body.literal, np.uint8)[begin : begin + len(view)]
        return
    if body.rows is None:
        view[:] = 0
        return
    # Behind the last element is padding: the buffer is used again and again, so it is cleared.
    content = min(max(body.rows.content_bytes - begin, 0), len(view))
    view[content:] = 0
    filled = gatherer.fill(body.rows, begin, view)
    if filled != content:
        raise error(
            ErrorKind.TASK,
            "window-not-covered",
            f"{filled} of {content} bytes of a window were planned",
            hint="please report this: it is a fault here, and nothing was published",
        )


def _in_file(fault: ReshardError, url: str) -> ReshardError:
    """Say which target file was being written."""
    return ReshardError(
        type(problem)(
            problem.kind, problem.reference, problem.message, (*problem.context, f"while writing {url}"), problem.hint
        )
        for problem in fault.problems
    )
