"""The DAG of a run, as data: which node of which kind, and what it needs. And the functions that workers call.

    unflatten (a node for each source file) -> regroup (for each MP slice) -> write (for each target file)

The driver looks at the summaries between the kinds, so that everything wrong is told at once, before the first write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from cluster.dag import Node
from pipeline.options import Request
from pipeline.planning import Plan
from tasks import storage
from tasks.checkpoint import ShardIndex
from tasks.errors import ErrorKind, Problem, ReshardError, error
from tasks.faults import reach
from tasks.formats.metaseq_files import ShardFile
from tasks.regroup_mp_slice import SliceSummary, regroup_mp_slice
from tasks.source import Source
from tasks.storage import FileIdentity
from tasks.target import Target
from tasks.unflatten_source_shard import unflatten_source_shard
from tasks.write_target_shard import ShardResult, write_target_shard

_PIECE_BYTES = 16 << 20

# Says in the target whose it is.
RUN = "run.json"
UNFLATTEN, REGROUP, WRITE = "unflatten_source_shard", "regroup_mp_slice", "write_target_shard"


def unflatten(identity: FileIdentity, mp: int, dp: int) -> tuple[ShardIndex, None]:
    return unflatten_source_shard(identity, mp, dp), None


def regroup(source: Source, target: Target, mp: int, replica_part: int | None) -> tuple[SliceSummary, pa.Table]:
    return regroup_mp_slice(source, target, mp, replica_part)


def write(
    source: Source,
    target: Target,
    mp: int,
    dp: int,
    paths: Mapping[str, str],
    memory_bytes: int,
    durable: bool,
    table: pa.Table,
) -> tuple[ShardResult, None]:
    """Write one target file, then its completion record; the first file of a slice saves the slice's plan as well.

    Records and plans need not survive a power cut: without them the work is done again. An fsync for each of them would
    make the file system flush everything else that was written.
    """
    kept = finished_before(paths)
    if kept is not None:
        return kept, None
    if dp == 0:
        save_table(paths["plan"], table)
        reach("plan-saved", paths["plan"])
    file, temporary = paths["file"], paths["temporary"]
    mine = partial(check_run, paths)
    result = write_target_shard(
        source, target, mp, dp, file, temporary, memory_bytes, durable, table, before_commit=mine
    )
    reach("file-committed", file)
    storage.write_small(paths["record"], record_of(paths["plan_id"], result), durable=False)
    reach("record-written", paths["record"])
    return result, None


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


def finished_before(paths: Mapping[str, str]) -> ShardResult | None:
    """Return the result of an earlier run whose record holds: same plan, and the file still has its checksum."""
    try:
        record = json.loads(storage.read_small(paths["record"]))
        ranges = tuple(tuple(item) for item in record.pop("read_ranges"))
        if record.pop("plan_id") != paths["plan_id"]:
            return None
        result = replace(ShardResult(**record), read_ranges=ranges, kept=True)
        identity = storage.stat(paths["file"])
    except (ReshardError, ValueError, TypeError, KeyError, AttributeError):
        return None  # no record, a torn one, one of another version, or no file: the work is done again
    return result if identity.size_bytes == result.size_bytes and checksum(identity) == result.crc32 else None


def checksum(identity: FileIdentity) -> int:
    """Return the CRC32 of a whole file, read in bounded pieces."""
    crc = 0
    buffer = memoryview(bytearray(min(_PIECE_BYTES, identity.size_bytes)))
    with storage.open_reader(identity) as reader:
        for begin in range(0, identity.size_bytes, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, identity.size_bytes - begin)]
            reader.read_into(begin, piece)
            crc = isal_zlib.crc32(piece, crc)
    return crc


def record_of(plan_id: str, result: ShardResult) -> bytes:
    """Make the completion record of a file. What was read for it is in it: a rerun must still check the source."""
    return json.dumps({"plan_id": plan_id, **asdict(result)}).encode()


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
    """One node for each target file; of those with a record, the node only holds the file against it."""
    return [
        Node(
            f"write {mp} {dp}",
            WRITE,
            (source, target, mp, dp, paths(plan, folder, mp, dp), request.memory_bytes, request.durable),
            needs=(f"regroup {mp}",),
        )
        for mp, dp in plan.ranks()
    ]


def paths(plan: Plan, folder: str, mp: int, dp: int) -> dict[str, str]:
    """Name everything that the node of one target file writes."""
    name = plan.file_name(mp, dp)
    work = storage.join(folder, ".reshard")
    return {
        "file": storage.join(folder, name),
        "temporary": storage.join(work, "temporary"),
        "run": storage.join(work, RUN),
        "plan": storage.join(work, "plan.parquet", f"model_part-{mp}.parquet"),
        "record": storage.join(work, "records", f"{name}.json"),
        "plan_id": plan.plan_id,
    }


def capacity_problems(messages: Sequence[str]) -> list[Problem]:
    problems = []
    for message in messages:
        what, _, hint = message.partition("\n  next: ")
        problems.append(Problem(ErrorKind.PLAN, "no-capacity", what, hint=hint))
    return problems
