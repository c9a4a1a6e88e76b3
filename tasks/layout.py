"""Pure. A layout says which box of which global tensor lies at which place of which file.

A *stream* is a row of elements, stored one after another over one or more places: an FSDP flat parameter cut into
data-parallel chunks, or one named tensor at one place. A *piece* is a box of a global tensor that lies in row-major
order at some offset of a stream. Source and target are both pieces on streams, so nothing but a format ever asks
"flat or not?".

All counts are elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.geometry import Box
from tasks.intersection import Int64


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many ranks there are on each axis, outermost first."""

    mp: int
    dp: int

    def __str__(self) -> str:
        return f"mp{self.mp} x dp{self.dp}"


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A whole tensor as the model knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool = False
    "buffers keep their dtype when weights are cast, and are never flattened"


# Training state is named after its parameter; no parameter's name has this character.
_STATE_MARK = "|"


def state_key(state: str, name: str) -> str:
    """Return the name of a tensor's training state: `state` is 'exp_avg', 'ema' and so on, '' for the weight itself.

    >>> state_key("exp_avg", "fc1.weight"), state_key("", "fc1.weight")
    ('exp_avg|fc1.weight', 'fc1.weight')
    """
    return f"{state}{_STATE_MARK}{name}" if state else name


def split_key(key: str) -> tuple[str, str]:
    """Return (state, name of the weight).

    >>> split_key("exp_avg|fc1.weight"), split_key("fc1.weight")
    (('exp_avg', 'fc1.weight'), ('', 'fc1.weight'))
    """
    state, _, name = key.rpartition(_STATE_MARK)
    return state, name


@dataclass(frozen=True, slots=True)
class Stream:
    """A row of elements over one or more places; place i holds elements [i * chunk, (i + 1) * chunk) of it.

    FSDP cuts a flat parameter of n elements over W ranks into chunks of ceil(n / W); ranks past the end hold nothing
    but padding (fairscale `FullyShardedDataParallel._get_shard`, torch.chunk).
    """

    dtype: str
    num_elements: int
    "without padding"
    chunk: int
    files: tuple[int, ...]
    "for each place, the number of its file"
    offsets_bytes: tuple[int, ...]
    "for each place, where its first element stands: in a source, in the file; in a target, in its storage"
    scales: tuple[float, ...] = ()
    "for each place, what its numbers are to be multiplied by; empty: nothing"

    def __post_init__(self) -> None:
        if len(self.files) != len(self.offsets_bytes) or self.chunk * len(self.files) < self.num_elements:
            raise ValueError(f"{len(self.files)} places of {self.chunk} cannot hold {self.num_elements} elements")

    def num_stored(self, place: int) -> int:
        """Return how many elements, padding excepted, stand at a place."""
        return max(0, min(self.chunk, self.num_elements - place * self.chunk))


def fsdp_chunk(num_elements: int, num_shards: int) -> int:
    """Return the length of every shard, padding included, of a flat parameter.

    >>> fsdp_chunk(5, 4), fsdp_chunk(10, 1)
    (2, 10)
    """
    return -(-num_elements // num_shards)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor in a stream."""

    tensor: str
    box: Box
    stream: int
    "index in the slice's streams"
    offset: int
    "of the box's first element in the stream"


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """All that one model-parallel rank holds."""

    pieces: tuple[Piece, ...]
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Where a piece's box is cut by the chunks of its stream, one row a stretch, in order."""

    starts: Int64
    "in the row-major order of the box; each ends where the next begins"
    places: Int64
    "index of the stream's place"
    offsets: Int64
    "of the stretch's first element, from the start of its place"


def stretches(piece: Piece, stream: Stream) -> Stretches:
    """Cut a piece at the chunks of its stream.

    >>> stream = Stream("float16", 10, 4, (0, 1, 2), (0, 0, 0))
    >>> cut = stretches(Piece("w", Box((0,), (5,)), 0, 3), stream)
    >>> cut.starts.tolist(), cut.places.tolist(), cut.offsets.tolist()
    ([0, 1], [0, 1], [3, 0])
    """
    size = piece.box.num_elements
    chunk = max(stream.chunk, 1)
    first = piece.offset // chunk
    last = max(first, (piece.offset + size - 1) // chunk)
    places = np.arange(first, last + 1, dtype=np.int64)
    begins = np.maximum(places * chunk, piece.offset)
    return Stretches(begins - piece.offset, places, begins - places * chunk)


def tiling_faults(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[str]:
    """Say how distinct boxes fail to cover a tensor exactly once: out of bounds, overlapping, or leaving a hole.

    In bounds, disjoint and of equal volume means covered exactly once (the three-part check of torch's
    `_validate_global_plan`).
    """
    faults = []
    for box in boxes:
        ends = [s + n for s, n in zip(box.start, box.shape, strict=True)]
        if len(box.shape) != len(shape) or any(end > n for end, n in zip(ends, shape, strict=False)):
            faults.append(f"box {box.start}+{box.shape} is outside of shape {shape}")
    ordered = sorted(boxes, key=lambda box: box.start)
    if not faults:
        for index, box in enumerate(ordered):
            # Boxes of one tensor are few (one for each model-parallel rank), so neighbours to the end are affordable.
            for other in ordered[index + 1 :]:
                if box.shape and other.start[0] >= box.start[0] + box.shape[0]:
                    break
                if box.intersect(other):
                    faults.append(f"boxes {box.start}+{box.shape} and {other.start}+{other.shape} overlap")
    covered, size = sum(box.num_elements for box in boxes), Box((0,) * len(shape), shape).num_elements
    if not faults and covered != size:
        faults.append(f"{covered} of {size} elements are there")
    return faults
