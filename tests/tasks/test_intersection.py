"""Segments against element-by-element copies of numpy arrays."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.geometry import Box
from tasks.intersection import concatenate, intersect


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(start, tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, np.ndarray, Box, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    parts: list[object] = [shape]
    for _ in range(2):
        box = draw(boxes(shape))
        cuts = draw(st.lists(st.integers(0, box.num_elements), max_size=5))
        parts += [box, np.array([0, *sorted(cuts)], np.int64)]
    return tuple(parts)  # type: ignore[return-value]


def view(array: np.ndarray, box: Box) -> np.ndarray:
    return array[(*(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True)), ...)]


@settings(max_examples=400, deadline=None)
@given(cases())
def test_segments_copy_the_intersection_and_nothing_else(case: tuple) -> None:
    shape, target, target_starts, source, source_starts = case
    everything = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    source_flat = view(everything, source).ravel()
    expected = np.zeros(shape, np.int64)
    common = target.intersect(source)
    if common is not None:
        view(expected, common)[...] = view(everything, common)
    expected_flat = view(expected, target).ravel()

    segments = intersect(target, target_starts, source, source_starts)
    written = np.zeros(target.num_elements, np.int64)
    target_stops = np.append(target_starts[1:], target.num_elements)
    source_stops = np.append(source_starts[1:], source.num_elements)
    for i in range(len(segments)):
        t, s = segments.target_stretch[i], segments.source_stretch[i]
        for row in range(segments.num_runs[i]):
            to = target_starts[t] + segments.target_offset[i] + row * segments.target_stride[i]
            at = source_starts[s] + segments.source_offset[i] + row * segments.source_stride[i]
            length = segments.run[i]
            assert target_starts[t] <= to
            assert to + length <= target_stops[t], "a segment stays inside its target stretch"
            assert source_starts[s] <= at
            assert at + length <= source_stops[s], "a segment stays inside its source stretch"
            assert not written[to : to + length].any(), "no element is written twice"
            written[to : to + length] = source_flat[at : at + length]
    np.testing.assert_array_equal(written, expected_flat)
    assert segments.num_elements == (common.num_elements if common else 0)


def test_a_cut_along_the_first_axis_is_one_contiguous_segment() -> None:
    zero = np.zeros(1, np.int64)
    segments = intersect(Box((4, 0), (4, 8)), zero, Box((0, 0), (8, 8)), zero)
    assert (len(segments), int(segments.run[0]), int(segments.num_runs[0])) == (1, 32, 1)


def test_a_column_cut_is_one_strided_segment() -> None:
    zero = np.zeros(1, np.int64)
    segments = intersect(Box((0, 2), (6, 2)), zero, Box((0, 0), (6, 8)), zero)
    assert len(segments) == 1
    assert (int(segments.run[0]), int(segments.num_runs[0]), int(segments.source_stride[0])) == (2, 6, 8)


def test_nothing_in_common_gives_no_segments() -> None:
    zero = np.zeros(1, np.int64)
    assert len(intersect(Box((0,), (2,)), zero, Box((2,), (2,)), zero)) == 0
    assert len(concatenate([])) == 0
