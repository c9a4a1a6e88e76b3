"""The DAG of a run, as data: which node of which kind, and what it needs. And the functions that workers call.

    unflatten (a node for each source file) -> regroup (for each MP slice) -> write (for each target file)

A large target file has nodes for its pieces between the two.

The driver looks at the summaries between the kinds, so that everything wrong is told at once, before the first write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.dag import Node
from pipeline.options import Request
from pipeline.planning import Plan
from pipeline.records import finished_before, may_be_finished, piece_finished_before, piece_record, record_of
from pipeline.work_folder import PIECES, PLANS, RECORDS, TEMPORARY, WORK
from tasks import storage
from tasks.checkpoint import ShardIndex
from tasks.errors import ErrorKind, Problem, error
from tasks.faults import reach
from tasks.file_work import Destination
from tasks.formats.metaseq_files import ShardFile
from tasks.regroup_mp_slice import SliceSummary, regroup_mp_slice
from tasks.source import Source
from tasks.storage import FileIdentity, limited
from tasks.target import Target
from tasks.unflatten_source_shard import unflatten_source_shard
from tasks.write_pieces import Member, PieceResult, write_pieces
from tasks.write_target_shard import ShardResult, write_target_shard

# Says in the target whose it is.
RUN = "run.json"
UNFLATTEN, REGROUP, WRITE = "unflatten_source_shard", "regroup_mp_slice", "write_target_shard"
Rank = tuple[int, int]
"(mp, dp) of a target file"


@dataclass(frozen=True, slots=True)
class TargetFile:
    """What is told to a node that writes to a file."""

    rank: Rank
    paths: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pieces:
    """One piece of each of some files, which are written side by side."""

    files: tuple[TargetFile, ...]
    number: int
    count: int


@limited
def unflatten(identity: FileIdentity, mp: int, dp: int) -> tuple[ShardIndex, None]:
    return unflatten_source_shard(identity, mp, dp), None


@limited
def regroup(source: Source, target: Target, mp: int, replica_part: int | None) -> tuple[SliceSummary, pa.Table]:
    return regroup_mp_slice(source, target, mp, replica_part)


@limited
def write(
    source: Source,
    target: Target,
    what: TargetFile | Pieces,
    memory_bytes: int,
    durable: bool,
    table: pa.Table,
    *more: Any,
) -> tuple[ShardResult | int, Mapping[Rank, PieceResult] | None]:
    """Write a file, or pieces of some.

    Of a file, `more` is what the nodes of its pieces returned; of pieces, the plans of the other files' parts.
    """
    if isinstance(what, TargetFile):
        return _write_file(source, target, what, memory_bytes, durable, table, more), None
    results = _write_pieces(source, target, what, memory_bytes, durable, (table, *more))
    return sum(result.written_bytes for result in results.values()), results


def _write_file(
    source: Source,
    target: Target,
    file: TargetFile,
    memory_bytes: int,
    durable: bool,
    table: pa.Table,
    pieces: Sequence[Mapping[Rank, PieceResult]],
) -> ShardResult:
    """Write one target file, but for its pieces.

    The first file of a slice saves the slice's plan as well.
    """
    mp, dp = file.rank
    to = _destination(file, memory_bytes, durable=durable)
    mine = [found[file.rank] for found in pieces]
    allow = partial(check_run, file.paths)
    work = partial(write_target_shard, source, target, mp, dp, to, table, mine, before_commit=allow)
    return _with_record(file.paths, table if dp == 0 else None, work)


def _write_pieces(
    source: Source,
    target: Target,
    pieces: Pieces,
    memory_bytes: int,
    durable: bool,
    tables: Sequence[pa.Table],
) -> Mapping[Rank, PieceResult]:
    """Write a piece of each of some files where it has no record yet, then leave records.

    The driver is told how many bytes these are; all else goes to the nodes of the files.
    """
    files, number, count = pieces.files, pieces.number, pieces.count
    found = {file.rank: _found_piece(file.paths, number, count) for file in files}
    left = [
        (file, Member(*file.rank, _destination(file, memory_bytes, durable=durable), table))
        for file, table in zip(files, tables, strict=True)
        if found[file.rank] is None
    ]
    made = write_pieces(source, target, [member for _, member in left], number, count) if left else []
    for (file, _), result in zip(left, made, strict=True):
        record = piece_record(file.paths, number, count)
        storage.write_small(record, record_of(file.paths["plan_id"], result), durable=False)
        reach("piece-recorded", record)
        found[file.rank] = result
    return {rank: result for rank, result in found.items() if result is not None}


def _destination(file: TargetFile, memory_bytes: int, *, durable: bool) -> Destination:
    paths = file.paths
    return Destination(paths["file"], paths["temporary"], memory_bytes, durable, paths["place"])


def _found_piece(paths: Mapping[str, str], number: int, count: int) -> PieceResult | None:
    if may_be_finished(paths):
        return PieceResult()  # the file's own node looks closer, and does what is missing
    return piece_finished_before(paths, piece_record(paths, number, count))


def _with_record(paths: Mapping[str, str], plan: pa.Table | None, work: Callable[[], ShardResult]) -> ShardResult:
    """Do what writes a file, then write its completion record; a plan that is given is saved before.

    Records and plans need not survive a power cut: without them the work is done again. An fsync for each of them would
    make the file system flush everything else that was written.
    """
    kept = finished_before(paths)
    if kept is not None:
        return kept
    if plan is not None:
        save_table(paths["plan"], plan)
        reach("plan-saved", paths["plan"])
    result = work()
    reach("file-committed", paths["file"])
    storage.write_small(paths["record"], record_of(paths["plan_id"], result), durable=False)
    reach("record-written", paths["record"])
    return result


def check_run(paths: Mapping[str, str]) -> None:
    """Raise where another plan's run has taken the target over: a worker may outlive its driver, and would spoil it."""
    run = json.loads(storage.read_small(paths["run"]))
    if run["plan_id"] != paths["plan_id"]:
        raise error(
            ErrorKind.TARGET,
            "target-in-use",
            f"{paths['file']} is not published: a run of another plan has taken the target over",
            context=(f"this run's plan: {paths['plan_id']}; there: {run['plan_id']}",),
            hint="python -m pipeline.status TARGET tells which; run this command again if that one was a mistake",
        )
    reach("commit-allowed", paths["file"])


def save_table(url: str, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    storage.write_small(url, sink.getvalue().to_pybytes(), durable=False)


FUNCTIONS: Mapping[str, Callable[..., tuple[Any, Any]]] = {UNFLATTEN: unflatten, REGROUP: regroup, WRITE: write}


def unflatten_nodes(files: Sequence[ShardFile]) -> list[Node]:
    return [
        Node(f"unflatten {number}", UNFLATTEN, (file.identity, file.mp, file.dp)) for number, file in enumerate(files)
    ]


def regroup_nodes(plan: Plan, source: object, target: object, replica_part: int | None) -> list[Node]:
    """`source` and `target` are handles of the plan's own, shared with all nodes."""
    return [
        Node(f"regroup {mp}", REGROUP, (source, target, mp, replica_part)) for mp in range(plan.target.options.mesh.mp)
    ]


def write_nodes(
    plan: Plan, source: object, target: object, folder: str, request: Request, *, share_rows: bool = False
) -> list[Node]:
    """One node for each target file, after one for each piece of a large one. What has a record is only checked.

    The pieces of one file come before those of the next, so that files are published early. `share_rows`: files of
    parts that take columns of the same rows of the source are written side by side.
    """
    nodes = []
    groups = plan.groups(request.target, request.memory_bytes) if share_rows else [[rank] for rank in plan.ranks()]
    # Once for each size of groups: it lays out a part of the target, and there may be thousands of files.
    counts = {size: plan.num_pieces(request.target, request.piece_bytes, size) for size in set(map(len, groups))}
    for ranks in groups:
        count = counts[len(ranks)]
        files = tuple(TargetFile(rank, paths(plan, folder, *rank, in_pieces=count > 0)) for rank in ranks)
        plans = tuple(f"regroup {mp}" for mp, _ in ranks)

        def node(name: str, what: TargetFile | Pieces, needs: tuple[str, ...]) -> Node:
            memories = (request.memory_bytes, request.memory_bytes // 2)
            first, smaller = ((source, target, what, memory_bytes, request.durable) for memory_bytes in memories)
            return Node(name, WRITE, first, needs, smaller)

        names = " and ".join(f"{mp} {dp}" for mp, dp in ranks)
        pieces = [node(f"write {names} piece {each}", Pieces(files, each, count), plans) for each in range(count)]
        done = tuple(piece.id for piece in pieces)
        nodes += pieces
        nodes += [
            node(f"write {file.rank[0]} {file.rank[1]}", file, (plan_of_part, *done))
            for file, plan_of_part in zip(files, plans, strict=True)
        ]
    return nodes


def paths(plan: Plan, folder: str, mp: int, dp: int, *, in_pieces: bool) -> dict[str, str]:
    """Name everything that the node of one target file writes."""
    name = plan.file_name(mp, dp)
    work = storage.join(folder, WORK)
    return {
        "file": storage.join(folder, name),
        "temporary": storage.join(work, TEMPORARY),
        "run": storage.join(work, RUN),
        "plan": storage.join(work, PLANS, f"model_part-{mp}.parquet"),
        "record": storage.join(work, RECORDS, f"{name}.json"),
        "place": storage.join(work, PIECES, f"{plan.plan_id}-{mp}-{dp}") if in_pieces else "",
        "plan_id": plan.plan_id,
    }


def capacity_problems(messages: Sequence[str]) -> list[Problem]:
    problems = []
    for message in messages:
        what, _, hint = message.partition("\n  next: ")
        problems.append(Problem(ErrorKind.PLAN, "no-capacity", what, hint=hint))
    return problems
