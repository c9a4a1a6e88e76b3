"""What every task that writes bytes of a target file needs: its layout, where its bytes come from, its window."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from tasks import storage
from tasks.checksums import Ledger, Trail
from tasks.convert import load_libraries
from tasks.errors import ReshardError
from tasks.file_stream import Body, FileStream, Steps, stream_units
from tasks.gather import SCRATCH_BYTES, Gatherer
from tasks.memory import PeakMemory, give_memory_back
from tasks.plan import rows_of_file
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.storage import buffered_bytes
from tasks.target import Target
from tasks.target_file import plan_file
from tasks.torchfile.archive_writer import ArchiveLayout
from tasks.write_behind import Put

# Objects of a file (its pickle, configuration and index) beside the buffers; measured 3-9 MiB for 1,200 tensors.
OBJECTS_BYTES = 12 << 20
# And of each further file that is written at the same time.
MORE_OBJECTS_BYTES = 6 << 20
# Where a file can only be written whole; larger windows were not faster.
WHOLE_UNIT_BYTES = 4 << 20
_SMALLEST_WINDOW_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a file goes, and at what cost."""

    url: str
    temporary_directory: str
    memory_bytes: int
    "of the task"
    durable: bool
    place: str = ""
    "of a file that is written in pieces (`storage.open_pieces`)"


@dataclass(frozen=True, slots=True)
class Task:
    """What the files that one task writes have in common."""

    source: Source
    target: Target
    readers: ReaderPool
    trail: Trail
    began: float
    memory: PeakMemory

    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass(frozen=True, slots=True)
class FileWork:
    """One file that is written, whole or in part."""

    to: Destination
    layout: ArchiveLayout
    bodies: list[Body]
    task: Task
    unit_bytes: int

    def units(self) -> range:
        return range(0, self.layout.size_bytes, self.unit_bytes)

    def stream(
        self, units: Sequence[int], storages: Ledger, put: Put, gatherer: Gatherer, window: int, *, since: int = 0
    ) -> Steps:
        """Make units and write those whose CRC32s are known, step by step."""
        made = FileStream(self.layout, self.bodies, gatherer, storages)
        return stream_units(
            made, self.layout.size_bytes, units, self.unit_bytes, window, put, since=since, url=self.to.url
        )

    def window_bytes(self, num_files: int = 1) -> int:
        """Return the window, where so many files like this one are written at the same time."""
        return window_bytes(self.unit_bytes, self.to.url, self.layout.size_bytes, self.to.memory_bytes, num_files)


@contextmanager
def open_task(source: Source, target: Target) -> Iterator[Task]:
    """Open what the files of a task are read with."""
    if target.options.dtype or target.options.moments_dtype:
        load_libraries()  # a library is no part of the budget, which is for what grows with the work
    give_memory_back()
    began, memory, trail = time.monotonic(), PeakMemory(), Trail()
    with ReaderPool(source.files, trail) as readers:
        yield Task(source, target, readers, trail, began, memory)


def plan_work(task: Task, mp: int, dp: int, to: Destination, table: pa.Table) -> FileWork:
    """Lay out the target file (mp, dp); `table` is its part's plan."""
    layout, bodies = plan_file(task.source, task.target, mp, dp, to.url, rows_of_file(table, dp), task.readers)
    unit = storage.unit_bytes(to.url, layout.size_bytes) or WHOLE_UNIT_BYTES
    return FileWork(to, layout, bodies, task, unit)


def projected_memory_bytes(url: str, size_bytes: int, window: int, num_files: int = 1) -> int:
    """Return the most memory that writing files of this size takes beyond an idle worker.

    A single file has two windows: one is filled while the other is written. Of several, each has these, and as much
    again is kept of the rows that they share.
    """
    objects = OBJECTS_BYTES + (num_files - 1) * MORE_OBJECTS_BYTES
    buffered = num_files * buffered_bytes(url, size_bytes, sharing=num_files)
    windows = 2 if num_files == 1 else 3 * num_files
    return windows * window + buffered + objects + SCRATCH_BYTES * (1 if num_files == 1 else 2)


def window_bytes(preferred: int, url: str, size_bytes: int, memory_bytes: int, num_files: int = 1) -> int:
    """Return the window for a budget: the writer's own, or the largest multiple of 64 KiB that the budget allows."""
    room = memory_bytes - projected_memory_bytes(url, size_bytes, 0, num_files)
    window = min(preferred, room // (2 if num_files == 1 else 3 * num_files))
    return max(window // _SMALLEST_WINDOW_BYTES * _SMALLEST_WINDOW_BYTES, _SMALLEST_WINDOW_BYTES)


@contextmanager
def naming_file(url: str) -> Iterator[None]:
    """Say in errors which target file was being written."""
    try:
        yield
    except ReshardError as fault:
        raise ReshardError(
            type(problem)(
                problem.kind,
                problem.reference,
                problem.message,
                (*problem.context, f"while writing {url}"),
                problem.hint,
            )
            for problem in fault.problems
        ) from fault
