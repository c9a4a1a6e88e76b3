"""Streams, stretches and the proof that boxes tile a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.geometry import Box, lattices, whole
from tasks.layout import Piece, Stream, fsdp_chunk, stretches, tiling_faults


@given(st.integers(1, 200), st.integers(1, 40))
def test_chunks_are_those_of_fairscale(num_elements: int, ranks: int) -> None:
    chunk = fsdp_chunk(num_elements, ranks)
    stream = Stream("float32", num_elements, chunk, tuple(range(ranks)), (0,) * ranks)
    chunks = [len(part) for part in torch.arange(num_elements).chunk(ranks)]
    chunks += [0] * (ranks - len(chunks))
    assert [stream.num_stored(rank) for rank in range(ranks)] == chunks


def test_five_elements_over_four_ranks_leave_a_shard_of_padding() -> None:
    stream = Stream("float32", 5, fsdp_chunk(5, 4), (0, 1, 2, 3), (0, 0, 0, 0))
    assert [stream.num_stored(rank) for rank in range(4)] == [2, 2, 1, 0]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 40))
def test_stretches_tile_the_box_and_stay_in_their_chunks(size: int, chunk: int, offset: int) -> None:
    places = -(-(offset + size) // chunk)
    stream = Stream("float16", offset + size, chunk, tuple(range(places)), (0,) * places)
    cut = stretches(Piece("w", Box((0,), (size,)), 0, offset), stream)
    assert cut.starts[0] == 0
    ends = [*cut.starts[1:], size]
    for start, end, place, at in zip(cut.starts, ends, cut.places, cut.offsets, strict=True):
        assert start < end
        assert place * chunk + at == offset + start
        assert at + (end - start) <= chunk


def test_a_stream_that_cannot_hold_its_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        Stream("float16", 9, 4, (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], None),
        ([Box((0, 0), (2, 4))], "8 of 16 elements"),
        ([Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "overlap"),
        ([Box((0, 0), (4, 5))], "outside"),
        ([Box((0, 0), (4, 2)), Box((0, 2), (4, 2))], None),
    ],
)
def test_holes_overlaps_and_bounds_are_told(boxes: list[Box], said: str | None) -> None:
    faults = tiling_faults((4, 4), boxes)
    assert (faults == []) if said is None else (said in faults[0])


def test_boxes_cut_along_two_axes_give_one_lattice_for_each_outer_index() -> None:
    found = list(lattices(Box((0, 0, 1), (2, 3, 2)), whole((2, 3, 4))))
    assert sum(item.run * item.num_runs for item in found) == 12
    assert all(item.run == 2 for item in found)
