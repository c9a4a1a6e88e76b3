"""Task: regroup MP slice. Plans one model-parallel part of the target, and proves that the plan may be carried out.

Three proofs: the plan covers every element of the part exactly once; replicas that several source ranks hold are
equal bit for bit; filler whose place was inferred is zero. Copies are compared by the nodes of all parts, a share
each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from tasks.checksums import Range, Trail
from tasks.compare import check_padding, compare_copies
from tasks.errors import Problem, ReshardError
from tasks.faults import reach
from tasks.gather import SCRATCH_BYTES
from tasks.plan import Copies, Copy, bytes_needed, plan_slice, source_copies, span_bytes
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.target import Target

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SliceSummary:
    """What the driver is told of one part's plan."""

    mp: int
    num_segments: int
    num_source_files: int
    bytes_needed: int
    "of the source's tensors, by the segments"
    span_bytes: int
    "that are read to get them: strided runs are read with what stands between them"
    num_requests: int
    "by which they are read, at least"
    compared_bytes: int
    "read to compare copies"
    problems: tuple[Problem, ...]
    read_ranges: tuple[Range, ...] = ()
    "what was read to compare, with checksums"


def regroup_mp_slice(
    source: Source,
    target: Target,
    mp: int,
    replica_part: int | None = None,
    *,
    copies: Copies | None = None,
    compare: bool = True,
) -> tuple[SliceSummary, pa.Table]:
    """Plan one part of the target.

    `copies` are those of the source, where they are known. `compare=False` leaves out everything that reads tensor
    bytes (for a dry run).
    """
    copies = source_copies(source) if copies is None else copies
    table, problems = plan_slice(source, target, mp, copies=copies, replica_part=replica_part)
    compared, trail = 0, Trail()
    if compare:
        try:
            with ReaderPool(source.files, trail) as readers:
                problems += _compare(source, target, mp, replica_part, copies, readers)
                compared = readers.bytes_read
        except ReshardError as fault:
            problems += fault.problems
    spans = span_bytes(table)
    reach("slice-planned")
    return (
        SliceSummary(
            mp=mp,
            num_segments=len(table),
            num_source_files=len(np.unique(np.asarray(table.column("source_file")))),
            bytes_needed=bytes_needed(table),
            span_bytes=int(spans.sum()),
            num_requests=int((-(-spans // SCRATCH_BYTES)).sum()),
            compared_bytes=compared,
            problems=tuple(problems),
            read_ranges=trail.ranges(),
        ),
        table,
    )


def _compare(
    source: Source, target: Target, mp: int, replica_part: int | None, copies: Copies, readers: ReaderPool
) -> list[Problem]:
    num_parts = target.options.mesh.mp
    problems: list[Problem] = []
    for name, group in _share(_replicated(source, copies, replica_part), mp, num_parts):
        problems += compare_copies(name, group, source, readers, what="replica")
    for name, repeated in _share(source.untested_ties, mp, num_parts):
        for box, first in copies[name].items():
            pair = (first[0], copies[repeated][box][0])
            problems += compare_copies(repeated, pair, source, readers, what="tie")
    problems += check_padding(list(_share(source.paddings, mp, num_parts)), source, readers)
    return problems


def _replicated(source: Source, copies: Copies, part: int | None) -> Iterator[tuple[str, tuple[Copy, ...]]]:
    """Yield what must be equal; where one part was chosen to be right, only that part's own copies."""
    for name, boxes in copies.items():
        for copies_of_box in boxes.values():
            group = copies_of_box if part is None else tuple(copy for copy in copies_of_box if copy.mp == part)
            # Moments with factors are rounded under each part's own: there is nothing that must be equal bit for bit.
            scaled = any(copy.stream.scales for copy in group)
            if len(group) > 1 and name not in source.proven_equal and not scaled:
                yield name, group


def _share(items: Iterable[T], mp: int, num_parts: int) -> Iterator[T]:
    """Yield this part's share of what is checked once for the whole checkpoint."""
    return itertools.islice(items, mp, None, num_parts)
