"""The bytes of one target file, window by window: what torch.save writes around the storages, and the storages' own.

What stands behind a storage holds its CRC32, so it is known only when all of the storage was made, here or by another
task. `Ledger` streams are the storages, by number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib

from tasks.checksums import Ledger, Range
from tasks.errors import ErrorKind, error
from tasks.faults import reach
from tasks.gather import Bytes, Gatherer, Rows
from tasks.torchfile.archive_writer import ArchiveLayout
from tasks.write_behind import Put, WriteBehind

Steps = Generator[None, None, tuple[Range, ...]]


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


class FileStream:
    """Makes the bytes of units of a file, each unit from its beginning to its end; notes CRC32s in the ledger."""

    def __init__(self, layout: ArchiveLayout, bodies: list[Body], gatherer: Gatherer, ledger: Ledger) -> None:
        self._layout = layout
        self._bodies = bodies
        self._gatherer = gatherer
        self._ledger = ledger
        self._offsets = layout.storage_offsets_bytes
        self._open: Range | None = None
        self._tail = b""

    def fill(self, begin: int, view: Bytes) -> int | None:
        """Make the bytes from `begin` on and return their CRC32; None if there is one in them that is not known."""
        end = begin + len(view)
        known, crc, at = True, 0, begin
        number = bisect_right(self._offsets, begin) - 1
        while at < end:
            if number >= 0 and at < (behind := self._layout.gap_offset_bytes(number)):
                stop = min(behind, end)
                more = self._fill_body(number, at - self._offsets[number], view[at - begin : stop - begin])
                crc = isal_zlib.crc32_combine(crc, more, stop - at)
            else:
                literal_begin = self._layout.gap_offset_bytes(number) if number >= 0 else 0
                stop = min(self._next_offset(number), end)
                literal = self._literal(number)
                known &= literal is not None
                if literal is not None:
                    piece = literal[at - literal_begin : stop - literal_begin]
                    view[at - begin : stop - begin] = np.frombuffer(piece, np.uint8)
                    crc = isal_zlib.crc32(piece, crc)
                number += stop == self._next_offset(number)
            at = stop
        return crc if known else None

    def end_unit(self) -> None:
        """Note the CRC32 of the part of a storage with which a unit ends."""
        noted, self._open = self._open, None
        if noted is not None:
            try:
                self._ledger.add(noted)
            except ValueError as fault:
                raise error(
                    ErrorKind.TASK,
                    "read-differently",
                    f"storage {noted[0]} of the target: {fault}",
                    hint="nothing was published; the source's storage gives different bytes each time: check it",
                ) from fault

    def is_known(self, begin: int, end: int, since: int) -> bool:
        """Tell whether all CRC32s in a range will be known, once everything from `since` up to it was made here."""
        number = max(bisect_right(self._offsets, begin) - 1, 0)
        while number < len(self._offsets) and self._layout.gap_offset_bytes(number) < end:
            last = number == len(self._offsets) - 1
            if self._next_offset(number) > begin and not all(
                self._offsets[each] >= since or self._total(each) is not None
                for each in (range(number + 1) if last else (number,))
            ):
                return False
            number += 1
        return True

    def _total(self, number: int) -> int | None:
        return self._ledger.total(number, self._bodies[number].size_bytes)

    def _next_offset(self, number: int) -> int:
        return self._offsets[number + 1] if number + 1 < len(self._offsets) else self._layout.size_bytes

    def _literal(self, number: int) -> bytes | None:
        """Make what stands behind a storage; -1: before the first one."""
        self.end_unit()
        if number < 0:
            return self._layout.head if self._offsets else self._layout.head + self._layout.tail(())
        if number == len(self._offsets) - 1:
            if not self._tail:
                crcs = [self._total(each) for each in range(len(self._offsets))]
                if None in crcs:
                    return None
                self._tail = self._layout.tail([crc for crc in crcs if crc is not None])
            return self._tail
        crc = self._total(number)
        return None if crc is None else self._layout.between(number, crc)

    def _fill_body(self, number: int, begin: int, view: Bytes) -> int:
        crc = self._make(self._bodies[number], begin, view)
        crc = isal_zlib.crc32(view) if crc is None else crc
        if self._open is not None and self._open[0] == number:
            _, first, length, before = self._open
            self._open = (number, first, length + len(view), isal_zlib.crc32_combine(before, crc, len(view)))
        else:
            self._open = (number, begin, len(view), crc)
        return crc

    def _make(self, body: Body, begin: int, view: Bytes) -> int | None:
        """Make part of a storage; return its CRC32 if the readers have made it already."""
        if body.file is not None:
            return self._gatherer.read(body.file, body.offset_bytes + begin, view)
        if body.literal is not None:
            view[:] = np.frombuffer(body.literal, np.uint8)[begin : begin + len(view)]
            return None
        if body.rows is None:
            view[:] = 0
            return None
        # Behind the last element is padding: the buffer is used again and again, so it is cleared.
        content = min(max(body.rows.content_bytes - begin, 0), len(view))
        view[content:] = 0
        filled, crc = self._gatherer.fill(body.rows, begin, view)
        if filled != content:
            raise error(
                ErrorKind.TASK,
                "window-not-covered",
                f"{filled} of {content} bytes of a window were planned",
                hint="please report this: it is a fault here, and nothing was published",
            )
        return None if crc is None else isal_zlib.crc32(view[content:], crc)


def stream_units(
    made: FileStream,
    size_bytes: int,
    units: Sequence[int],
    unit_bytes: int,
    window: int,
    put: Put,
    *,
    since: int = 0,
    url: str = "",
) -> Steps:
    """Make units of a file in order and write those whose CRC32s are known; everything from `since` on is made here.

    A step is a window; `in_turn` carries them out, and returns what was written, as ranges of stream 0.
    """
    size = min(window, unit_bytes, size_bytes)
    buffer, other = np.empty(size, np.uint8), np.empty(size, np.uint8)
    written = []
    with WriteBehind(put) as behind:
        for begin in units:
            end = min(begin + unit_bytes, size_bytes)
            known = made.is_known(begin, end, since)
            total = 0
            for at in range(begin, end, size):
                view = buffer[: min(size, end - at)]
                crc = made.fill(at, view)
                if known:
                    if crc is None:
                        raise ValueError(f"{url}: a checksum at {at} is not known")
                    total = isal_zlib.crc32_combine(total, crc, len(view))
                    behind.write(at, view.data, crc)
                    buffer, other = other, buffer  # only now: the one before is written, this one not yet
                reach("window-written", url)
                yield
            made.end_unit()
            if known:
                written.append((0, begin, end - begin, total))
    return tuple(written)


def in_turn(files: Sequence[Steps]) -> list[tuple[Range, ...]]:
    """Carry out the steps of several files side by side: a window of each, then the next of each."""
    written: dict[int, tuple[Range, ...]] = {}
    with ExitStack() as stack:
        for steps in files:
            stack.callback(steps.close)
        while len(written) < len(files):
            for number, steps in enumerate(files):
                if number in written:
                    continue
                try:
                    next(steps)
                except StopIteration as end:
                    written[number] = end.value
    return [written[number] for number in range(len(files))]
