"""The DAG of a run, as data: which node of which kind, and what it needs. And the functions that workers call.

    unflatten (a node for each source file) -> regroup (for each MP slice) -> write (for each target file)

A large target file has nodes for its pieces between the two.

The driver looks at the summaries between the kinds, so that everything wrong is told at once, before the first write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from tasks.formats.metaseq_files import ShardFile
from tasks.regroup_mp_slice import SliceSummary, regroup_mp_slice
from tasks.source import Source
from tasks.storage import FileIdentity, limited
from tasks.target import Target
from tasks.unflatten_source_shard import unflatten_source_shard
from tasks.write_target_shard import Destination, PieceResult, ShardResult, write_piece, write_target_shard

# Says in the target whose it is.
RUN = "run.json"
UNFLATTEN, REGROUP, WRITE = "unflatten_source_shard", "regroup_mp_slice", "write_target_shard"


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
    mp: int,
    dp: int,
    paths: Mapping[str, str],
    memory_bytes: int,
    durable: bool,
    piece: tuple[int, int] | None,
    table: pa.Table,
    *pieces: PieceResult,
) -> tuple[ShardResult | int, PieceResult | None]:
    """Write one target file, but for its `pieces`; or one `piece` of it: (number, count). Then leave a record.

    The first file of a slice saves the slice's plan as well. The driver is told of a piece how many bytes it has; all
    else goes to the node of the file.
    """
    to = Destination(paths["file"], paths["temporary"], memory_bytes, durable, paths["place"])
    what = (source, target, mp, dp, to, table)
    if piece is not None:
        result = _write_piece(paths, piece_record(paths, *piece), partial(write_piece, *what, *piece))
        return result.written_bytes, result
    work = partial(write_target_shard, *what, pieces, before_commit=partial(check_run, paths))
    return _write_file(paths, table if dp == 0 else None, work), None


def _write_file(paths: Mapping[str, str], plan: pa.Table | None, work: Callable[[], ShardResult]) -> ShardResult:
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


def _write_piece(paths: Mapping[str, str], record: str, work: Callable[[], PieceResult]) -> PieceResult:
    if may_be_finished(paths):
        return PieceResult()  # the file's own node looks closer, and does what is missing
    result = piece_finished_before(paths, record)
    if result is None:
        result = work()
        storage.write_small(record, record_of(paths["plan_id"], result), durable=False)
        reach("piece-recorded", record)
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


def write_nodes(plan: Plan, source: object, target: object, folder: str, request: Request) -> list[Node]:
    """One node for each target file, after one for each piece of a large one. What has a record is only checked.

    The pieces of one file come before those of the next, so that files are published early.
    """
    count = plan.num_pieces(request.target, request.piece_bytes)
    nodes = []
    for mp, dp in plan.ranks():
        where = paths(plan, folder, mp, dp, in_pieces=count > 1)
        pieces = {f"write {mp} {dp} piece {number}": (number, count) for number in range(count) if count > 1}
        for name, piece in {**pieces, f"write {mp} {dp}": None}.items():
            arguments, smaller = (
                (source, target, mp, dp, where, memory_bytes, request.durable, piece)
                for memory_bytes in (request.memory_bytes, request.memory_bytes // 2)
            )
            needs = (f"regroup {mp}", *(() if piece else pieces))
            nodes.append(Node(name, WRITE, arguments, needs, smaller))
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
