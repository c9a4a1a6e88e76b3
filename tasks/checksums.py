"""Pure. Holds the bytes that were read against the checksums that the training job stored in its files.

Nothing in torch checks them on loading, so a damaged file loads silently. Every byte that goes into a target is read
once, and CRC32s of neighbouring ranges combine, so a source is checked without reading it twice.

>>> trail = Trail()
>>> made = [trail.add(*read) for read in ((0, 100, b"ab"), (0, 102, b"c"), (1, 0, b"d"))]
>>> len(made), len(trail.ranges())
(3, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from isal import isal_zlib

Range = tuple[int, int, int, int]
"(number of the file, offset in bytes, length in bytes, CRC32)"


class Trail:
    """The ranges that were read, those that follow each other joined."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], Range] = {}

    def add(self, file: int, offset_bytes: int, data: bytes | memoryview) -> int:
        """Note a range just read; return its CRC32."""
        length, crc = len(data), isal_zlib.crc32(data)
        own = crc
        before = self._ends.pop((file, offset_bytes), None)
        if before is not None:
            crc = isal_zlib.crc32_combine(before[3], crc, length)
            offset_bytes, length = before[1], before[2] + length
        # Files that are written side by side read some ranges again: what was joined already says more.
        there = self._ends.get((file, offset_bytes + length))
        if there is None or there[2] < length:
            self._ends[file, offset_bytes + length] = (file, offset_bytes, length, crc)
        return own

    def ranges(self) -> tuple[Range, ...]:
        return tuple(self._ends.values())


class Ledger:
    """CRC32s of ranges of several streams, noted in any order; those of a whole stream are combined of its ranges'.

    >>> ledger = Ledger([(7, 2, 1, isal_zlib.crc32(b"c"))]); ledger.total(7, 3)
    >>> ledger.add((7, 0, 2, isal_zlib.crc32(b"ab"))); ledger.total(7, 3) == isal_zlib.crc32(b"abc")
    True
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}
        for each in ranges:
            self.add(each)

    def add(self, noted: Range) -> None:
        """Note a range; one that was noted before must be the same again, else ValueError."""
        stream, begin, length, crc = noted
        if self._ranges.setdefault(stream, {}).setdefault(begin, (length, crc)) != (length, crc):
            raise ValueError(f"{length} bytes at {begin} are not what they were when they were read before")

    def total(self, stream: int, size_bytes: int) -> int | None:
        """Return the CRC32 of a whole stream, None while a range is missing."""
        ranges = self._ranges.get(stream, {})
        at = crc = 0
        while at < size_bytes:
            if at not in ranges:
                return None
            length, more = ranges[at]
            crc = isal_zlib.crc32_combine(crc, more, length)
            at += length
        return crc

    def ranges(self) -> tuple[Range, ...]:
        """List what was noted, in the order of streams and offsets."""
        return tuple(
            (stream, begin, *self._ranges[stream][begin])
            for stream in sorted(self._ranges)
            for begin in sorted(self._ranges[stream])
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A storage in a source file, with the checksum that the file states for it."""

    file: int
    offset_bytes: int
    size_bytes: int
    crc32: int
    tensor: str


ReadRange = Callable[[int, int, int], bytes]
"Reads (number of the file, offset, length)."


def check_records(records: Iterable[Record], ranges: Iterable[Range], read: ReadRange) -> tuple[int, list[Record]]:
    """Return how many records the ranges prove whole, and those that are damaged.

    A record counts where ranges tile it. What is missing at its end is padding, mostly zeros; where it seems not to be,
    it is read. Where several readers took overlapping spans of strided tensors, a record can stay unproven.
    """
    by_start: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for file, offset, length, crc in ranges:
        by_start.setdefault((file, offset), []).append((length, crc))
    proven, damaged = 0, []
    for record in records:
        verdict = _verdict(record, by_start, read)
        proven += verdict is True
        if verdict is False:
            damaged.append(record)
    return proven, damaged


# Padding is less than one element a rank. What is longer was left out by the readers, and is not read for this alone.
_LONGEST_PADDING_BYTES = 1 << 16


def _verdict(record: Record, by_start: dict[tuple[int, int], list[tuple[int, int]]], read: ReadRange) -> bool | None:
    """Follow ranges from the record's start to its end; several may start at one place."""
    end = record.offset_bytes + record.size_bytes
    # Positions reached, with the CRC32 of everything before them.
    reached = {record.offset_bytes: 0}
    waiting = [record.offset_bytes]
    while waiting and end not in reached:
        at = waiting.pop()
        for length, piece in by_start.get((record.file, at), ()):
            if at + length <= end and at + length not in reached:
                reached[at + length] = isal_zlib.crc32_combine(reached[at], piece, length)
                waiting.append(at + length)
    if end in reached:
        return reached[end] == record.crc32
    missing = end - max(reached)
    if missing == record.size_bytes or missing > _LONGEST_PADDING_BYTES:
        return None
    before = reached[max(reached)]
    if isal_zlib.crc32_combine(before, isal_zlib.crc32(bytes(missing)), missing) == record.crc32:
        return True
    padding = read(record.file, max(reached), missing)
    return isal_zlib.crc32_combine(before, isal_zlib.crc32(padding), missing) == record.crc32
