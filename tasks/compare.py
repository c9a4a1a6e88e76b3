"""Compares bytes that must be equal, in bounded windows: replicas of a tensor, stored ties, and padding that must be
zero.

Equality is of bits: equal NaNs are equal, and 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.errors import ErrorKind, Problem
from tasks.plan import Copy
from tasks.reader_pool import ReaderPool
from tasks.source import Padding, Source
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES

# Two windows are held at a time; large enough that requests to remote storage are few.
WINDOW_BYTES = 4 << 20


def compare_copies(
    name: str,
    copies: Sequence[Copy],
    source: Source,
    readers: ReaderPool,
    *,
    what: str,
    window_bytes: int = WINDOW_BYTES,
) -> list[Problem]:
    """Compare all copies of one box with the first, and tell the first difference of each that differs."""
    first, *others = copies
    item = ITEM_SIZE_BYTES[first.stream.dtype]
    step = max(window_bytes // item, 1)
    size = first.piece.box.num_elements
    expected, actual = bytearray(min(step, size) * item), bytearray(min(step, size) * item)
    differing: dict[int, Problem] = {}
    for start in range(0, size, step):
        stop = min(start + step, size)
        left = memoryview(expected)[: (stop - start) * item]
        right = memoryview(actual)[: (stop - start) * item]
        read_elements(first, start, stop, left, readers)
        for number, other in enumerate(others):
            if number in differing:
                continue
            read_elements(other, start, stop, right, readers)
            if left != right:
                differing[number] = _difference(name, first, other, start, left, right, source, what)
    return list(differing.values())


def read_elements(copy: Copy, start: int, stop: int, buffer: memoryview, readers: ReaderPool) -> None:
    """Read elements [start, stop) of the row-major order of a copy's box."""
    item = ITEM_SIZE_BYTES[copy.stream.dtype]
    cut = copy.stretches()
    ends = np.append(cut.starts[1:], copy.piece.box.num_elements)
    for begin, end, place, offset in zip(cut.starts, ends, cut.places, cut.offsets, strict=True):
        low, high = max(int(begin), start), min(int(end), stop)
        if low >= high:
            continue
        at = copy.stream.offsets_bytes[place] + (int(offset) + low - int(begin)) * item
        readers.read_into(copy.stream.files[place], at, buffer[(low - start) * item : (high - start) * item])


def check_padding(paddings: Sequence[Padding], source: Source, readers: ReaderPool) -> list[Problem]:
    """Check that filler whose place was inferred is all zeros: if it is not, the inference is wrong."""
    problems = []
    for padding in paddings:
        if any(readers.read(padding.file, padding.offset_bytes, padding.length_bytes)):
            url = source.files[padding.file].url
            problems.append(
                Problem(
                    ErrorKind.SOURCE,
                    "padding-not-zero",
                    f"{url}: the end of {padding.tensor}, inferred to be padding, is not zero",
                    (f"{padding.length_bytes} bytes at offset {padding.offset_bytes}",),
                    "the layout inferred from cfg is wrong: pass files with shard_metadata",
                )
            )
    return problems


def _difference(
    name: str, first: Copy, other: Copy, start: int, left: memoryview, right: memoryview, source: Source, what: str
) -> Problem:
    item = ITEM_SIZE_BYTES[first.stream.dtype]
    unequal = (np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)).reshape(-1, item).any(axis=1)
    position = int(np.argmax(unequal))
    index = np.unravel_index(start + position, first.piece.box.shape or (1,))
    place = tuple(int(i) + s for i, s in zip(index, first.piece.box.start, strict=False))
    values = [_values(view, first.stream.dtype) for view in (left, right)]
    context = [
        f"first at index {place}",
        f"{int(unequal.sum())} elements differ in the {len(unequal)} compared with it",
    ]
    if values[0] is not None and values[1] is not None:
        context[0] += f": {values[0][position]} against {values[1][position]}"
        with np.errstate(all="ignore"):
            distance = np.abs(values[0].astype(np.float64) - values[1].astype(np.float64))
        finite = distance[np.isfinite(distance)]
        context.append(f"largest difference {finite.max() if finite.size else 'not a number'}")
    return Problem(
        ErrorKind.SOURCE,
        "replicas-differ" if what == "replica" else "ties-differ",
        f"{name} is not the same in {_place(first, source)} and in {_place(other, source)}",
        tuple(context),
        "if one part is known to be right, take it with --replica-part N"
        if what == "replica"
        else "cfg says that the two are tied: set share_decoder_input_output_embed to what is true",
    )


def _values(view: memoryview, dtype: str) -> npt.NDArray[Any] | None:
    if dtype == "bfloat16":
        return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(view, np.dtype(dtype)) if dtype in np.sctypeDict else None


def _place(copy: Copy, source: Source) -> str:
    return f"mp={copy.mp}, dp={copy.dp} ({source.files[copy.stream.files[0]].url}, {copy.piece.tensor})"
