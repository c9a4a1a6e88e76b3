"""Ranges that were read prove a record whole, or damaged, or nothing."""

from __future__ import annotations

import itertools
import zlib

from hypothesis import given
from hypothesis import strategies as st

from tasks.checksums import Record, Trail, check_records

DATA = bytes(range(1, 101))
RECORD = Record(0, 1000, 100, zlib.crc32(DATA), "w")


def never(*_place: int) -> bytes:
    raise AssertionError("nothing had to be read")


def trail(cuts: list[int], data: bytes = DATA, *, leave_out: int = -1) -> Trail:
    made = Trail()
    ends = [0, *sorted(set(cuts)), len(data)]
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end and number != leave_out:
            made.add(0, 1000 + begin, data[begin:end])
    return made


@given(st.lists(st.integers(1, 99), max_size=6), st.randoms())
def test_pieces_in_any_order_prove_the_record(cuts: list[int], random: object) -> None:
    ranges = list(trail(cuts).ranges())
    random.shuffle(ranges)  # type: ignore[attr-defined]
    assert check_records([RECORD], ranges, never) == (1, [])


@given(st.lists(st.integers(1, 99), max_size=6), st.integers(0, 99), st.integers(0, 7))
def test_one_flipped_bit_is_damage(cuts: list[int], at: int, bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << bit
    assert check_records([RECORD], trail(cuts, bytes(damaged)).ranges(), never) == (0, [RECORD])


def test_a_small_rest_is_read_and_what_nobody_read_proves_nothing() -> None:
    holed = trail([30, 60], leave_out=1).ranges()
    assert check_records([RECORD], holed, lambda _file, at, size: DATA[at - 1000 : at - 1000 + size]) == (1, [])
    assert check_records([RECORD], [], never) == (0, [])
    long = Record(0, 1000, 1 << 20, 1, "w")
    assert check_records([long], trail([]).ranges(), never) == (0, [])


def test_padding_that_was_not_read_is_taken_for_zeros_or_read() -> None:
    padded = Record(0, 1000, 104, zlib.crc32(DATA + bytes(4)), "w")
    assert check_records([padded], trail([50]).ranges(), never) == (1, [])
    filled = Record(0, 1000, 104, zlib.crc32(DATA + b"junk"), "w")
    asked: list[tuple[int, int, int]] = []

    def read(*place: int) -> bytes:
        asked.append(place)  # type: ignore[arg-type]
        return b"junk"

    assert check_records([filled], trail([50]).ranges(), read) == (1, [])
    assert asked == [(0, 1100, 4)]
    damaged = bytes([DATA[0] ^ 1]) + DATA[1:]
    assert check_records([padded], trail([50], damaged).ranges(), lambda *_: bytes(4)) == (0, [padded])


def test_overlapping_ranges_of_several_readers_still_tile_a_record() -> None:
    both = [*trail([40]).ranges(), *trail([70]).ranges(), (0, 1000, 70, zlib.crc32(DATA[:70]))]
    assert check_records([RECORD], both, never) == (1, [])


def test_what_is_read_again_does_not_hide_what_was_joined() -> None:
    trail = Trail()
    for offset, data in ((0, b"ab"), (2, b"c"), (2, b"c")):
        trail.add(0, offset, data)
    assert (0, 0, 3, zlib.crc32(b"abc")) in trail.ranges()
