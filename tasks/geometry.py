"""Pure. Boxes of global tensors, and how the intersection of two boxes lies in the row-major order of each.

All numbers are elements; ranges are half-open. A *stretch* is a run [start, stop) of the row-major order of a box: a
piece of an FSDP flat parameter, a whole file tensor and a chunk of another format are all stretches of boxes.
Stretches are kept whole rather than cut into up to 2n-1 boxes: two integers instead of several boxes, and the cuts
happen vectorised, later.

>>> Box((0, 2), (4, 2)).intersect(Box((2, 0), (4, 3)))
Box(start=(2, 2), shape=(2, 1))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a global tensor, in elements, half-open."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape) or min((*self.start, *self.shape), default=0) < 0:
            raise ValueError(f"not a box: start {self.start}, shape {self.shape}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides of the box on its own, in elements."""
        return row_major_strides(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common block, or None where there is none. Both boxes are of one tensor."""
        if len(self.shape) != len(other.shape):
            raise ValueError(f"boxes of different rank: {self} and {other}")
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def offset_of(self, point: tuple[int, ...]) -> int:
        """Return where a point of the global tensor stands in this box's row-major order."""
        return sum((p - s) * n for p, s, n in zip(point, self.start, self.strides, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """
    >>> row_major_strides((4, 3, 2))
    (6, 2, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Lattice:
    """`num_runs` runs of `run` elements that stand at even distances in two row-major orders at once."""

    target_offset: int
    target_stride: int
    source_offset: int
    source_stride: int
    run: int
    num_runs: int


def lattices(target: Box, source: Box) -> Iterator[Lattice]:
    """Yield how the intersection of two boxes lies in both, in row-major order of the intersection.

    A cut along one axis gives one lattice, contiguous in both where it is the first axis. Boxes that are cut along
    several axes give one lattice for each index of the outer ones.
    """
    common = target.intersect(source)
    if common is None:
        return
    rank = len(common.shape)
    # Inner axes that are whole in both boxes, and the axis before them, make one run.
    inner = rank
    while inner > 0 and common.shape[inner - 1] == target.shape[inner - 1] == source.shape[inner - 1]:
        inner -= 1
    run_axis = max(inner - 1, 0)
    run = math.prod(common.shape[run_axis:])
    # Axes before it that are whole in both, and one more before those, stand at even distances.
    outer = run_axis
    while outer > 1 and common.shape[outer - 1] == target.shape[outer - 1] == source.shape[outer - 1]:
        outer -= 1
    even_axis = max(outer - 1, 0)
    num_runs = math.prod(common.shape[even_axis:run_axis])
    target_stride = target.strides[run_axis - 1] if run_axis else run
    source_stride = source.strides[run_axis - 1] if run_axis else run
    for index in itertools.product(*(range(n) for n in common.shape[:even_axis])):
        point = tuple(s + i for s, i in zip(common.start, index, strict=False)) + common.start[even_axis:]
        lattice = Lattice(target.offset_of(point), target_stride, source.offset_of(point), source_stride, run, num_runs)
        yield merged(lattice)


def merged(lattice: Lattice) -> Lattice:
    """Return one run where the runs follow each other without a gap in both orders."""
    if lattice.num_runs > 1 and not lattice.target_stride == lattice.source_stride == lattice.run:
        return lattice
    length = lattice.run * lattice.num_runs
    return Lattice(lattice.target_offset, length, lattice.source_offset, length, length, 1)
