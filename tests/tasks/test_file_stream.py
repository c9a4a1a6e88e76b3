"""Files made in pieces, by writers that take their time: what a piece leaves to others, and what is in each buffer."""

from __future__ import annotations

import os
import time

import pytest

from tasks.checksums import Ledger
from tasks.errors import ReshardError
from tasks.file_stream import Body, FileStream, in_turn, stream_units
from tasks.gather import Gatherer
from tasks.reader_pool import ReaderPool
from tasks.torchfile.archive_writer import ArchiveLayout, plan_archive
from tasks.write_pieces import piece_span

SIZES = (64, 1000, 0, 5000, 8, 20_000, 24, 24, 700)
UNIT, WINDOW = 1024, 512


@pytest.fixture
def contents() -> list[bytes]:
    return [os.urandom(size) for size in SIZES]


def layout_of(contents: list[bytes]) -> ArchiveLayout:
    return plan_archive("a", b"a pickle", [len(content) for content in contents])


def stream(contents: list[bytes], ledger: Ledger) -> FileStream:
    bodies = [Body(len(content), literal=content) for content in contents]
    return FileStream(layout_of(contents), bodies, Gatherer(ReaderPool(())), ledger)


class SlowFile:
    """Looks at what it is given only after a while."""

    def __init__(self, size: int) -> None:
        self.content = bytearray(size)
        self.units: list[int] = []

    def put(self, at: int, view: memoryview) -> None:
        time.sleep(0.002)
        self.content[at : at + len(view)] = view
        self.units.append(at // UNIT * UNIT)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_pieces_and_what_they_leave_make_the_whole_file(count: int, contents: list[bytes]) -> None:
    size = layout_of(contents).size_bytes
    whole, pieces = SlowFile(size), SlowFile(size)
    units = range(0, size, UNIT)
    all_of_it = in_turn([stream_units(stream(contents, Ledger()), size, units, UNIT, WINDOW, whole.put)])[0]
    noted, written = Ledger(), []
    for number in reversed(range(count)):
        begin, end = piece_span(size, UNIT, number, count)
        mine = Ledger()
        made = stream(contents, mine)
        part = in_turn([stream_units(made, size, range(begin, end, UNIT), UNIT, WINDOW, pieces.put, since=begin)])[0]
        assert len(part) >= -(-(end - begin) // UNIT) - 3, "a piece leaves what needs others' checksums, and no more"
        written += part
        for each in mine.ranges():
            noted.add(each)
    missing = [unit for unit in units if unit not in pieces.units]
    assert (missing == []) == (count == 1)
    written += in_turn([stream_units(stream(contents, noted), size, missing, UNIT, WINDOW, pieces.put)])[0]
    assert pieces.content == whole.content
    assert sorted(written) == sorted(all_of_it)
    for content, begin in zip(contents, layout_of(contents).storage_offsets_bytes, strict=True):
        assert whole.content[begin : begin + len(content)] == content


def test_a_storage_that_reads_differently_the_second_time_is_an_error(contents: list[bytes]) -> None:
    size = layout_of(contents).size_bytes
    noted = Ledger()
    units = range(2 * UNIT, size, UNIT)
    written = in_turn(
        [stream_units(stream(contents, noted), size, units, UNIT, WINDOW, lambda *_: None, since=2 * UNIT)]
    )[0]
    left = sorted({*range(0, size, UNIT)} - {begin for _, begin, _, _ in written})
    changed = [bytes([content[0] ^ 1]) + content[1:] if content else b"" for content in contents]
    with pytest.raises(ReshardError, match="read-differently"):
        in_turn([stream_units(stream(changed, noted), size, left, UNIT, WINDOW, lambda *_: None)])[0]


def test_an_unknown_checksum_is_never_written(contents: list[bytes]) -> None:
    layout = layout_of(contents)
    made = stream(contents, Ledger())
    large = SIZES.index(20_000)
    behind = layout.gap_offset_bytes(large)
    assert not made.is_known(behind - 1, behind + 1, since=layout.storage_offsets_bytes[large] + 1)
    assert made.is_known(behind - 1, behind, since=behind - 1)
    assert made.is_known(behind - 1, behind + 1, since=layout.storage_offsets_bytes[large])
    assert not made.is_known(layout.size_bytes - 1, layout.size_bytes, since=1000)
