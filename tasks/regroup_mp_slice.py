"""Task: regroup MP slice. Plans one model-parallel part of the target, and proves that the plan may be carried out.

Three proofs: the plan covers every element of the part exactly once; replicas that several source ranks hold are equal bit
for bit; filler whose place was inferred is zero. Copies are compared by the nodes of all parts, a share each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.compare import check_padding, compare_copies
from tasks.errors import Problem, ReshardError
from tasks.plan import Copy, bytes_needed, plan_slice, source_copies
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.target import Target


@dataclass(frozen=True, slots=True)
class SliceSummary:
    """What the driver is told of one part's plan."""

    mp: int
    num_segments: int
    num_source_files: int
    bytes_needed: int
    "of the source's tensors, by the segments"
    strided_bytes: int
    "of those, in runs that are not contiguous"
    compared_bytes: int
    "read to compare copies"
    problems: tuple[Problem, ...]


def regroup_mp_slice(
    source: Source, target: Target, mp: int, replica_part: int | None = None, *, compare: bool = True
) -> tuple[SliceSummary, pa.Table]:
    """Plan one part of the target; `compare=False` leaves out everything that reads tensor bytes (for a dry run)."""
    copies = source_copies(source)
    table, problems = plan_slice(source, target, mp, copies=copies, replica_part=replica_part)
    compared = 0
    if compare:
        try:
            with ReaderPool(source.files) as readers:
                problems += _compare(source, target, mp, replica_part, copies, readers)
                compared = readers.bytes_read
        except ReshardError as fault:
            problems += fault.problems
    needed = bytes_needed(table)
    strided = bytes_needed(table.filter(np.asarray(table.column("num_runs")) > 1))
    files = len(np.unique(np.asarray(table.column("source_file"))))
    return SliceSummary(mp, len(table), files, needed, strided, compared, tuple(problems)), table


def _compare(source, target, mp, replica_part, copies, readers) -> list[Problem]:  # type: ignore[no-untyped-def]
    num_parts = target.options.mesh.mp
    problems: list[Problem] = []
    if replica_part is None:
        for name, group in _share(_replicated(source, copies), mp, num_parts):
            problems += compare_copies(name, group, source, readers, what="replica")
    ties = [(name, repeated) for name, repeated in source.untested_ties]
    for name, repeated in _share(iter(ties), mp, num_parts):
        for box, first in copies[name].items():
            group = [first[0], copies[repeated][box][0]]
            problems += compare_copies(repeated, group, source, readers, what="tie")
    problems += check_padding(list(_share(iter(source.paddings), mp, num_parts)), source, readers)
    return problems


def _replicated(source: Source, copies) -> Iterator[tuple[str, tuple[Copy, ...]]]:  # type: ignore[no-untyped-def]
    for name, boxes in copies.items():
        for group in boxes.values():
            if len(group) > 1 and name not in source.proven_equal:
                yield name, group


def _share(items, mp, num_parts):  # type: ignore[no-untyped-def]
    for number, item in enumerate(items):
        if number % num_parts == mp:
            yield item
