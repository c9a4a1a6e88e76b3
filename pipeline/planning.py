"""Decides source and target from what the index tasks found; the part of a run that dry runs and real runs share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from pipeline.options import Request
from tasks import storage
from tasks.checkpoint import ShardIndex, StoredTensor
from tasks.checksums import Record
from tasks.errors import ErrorKind, Problem, error, raise_if
from tasks.families.opt import OPT
from tasks.file_work import projected_memory_bytes
from tasks.formats.metaseq_files import Found, ShardFile
from tasks.formats.metaseq_names import parse, target_name
from tasks.formats.metaseq_source import build_source
from tasks.formats.metaseq_state_source import add_state
from tasks.formats.metaseq_target import dropped_state
from tasks.layout import Mesh
from tasks.source import Source
from tasks.target import Target, TargetOptions, plan_target, target_slice
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES
from tasks.unflatten_source_shard import unflatten_source_shard

# To be raised when the same request would give other bytes: units of two kinds must not meet in one file.
LAYOUT_VERSION = 1
# Enough to hide the latency of remote storage; more would only queue.
_INDEX_THREADS = 16
# The smallest window that is worth a request.
_SMALLEST_WINDOW_BYTES = 1 << 20
# Where several files share a worker: smaller ones cost more than reading rows several times.
_SHARED_WINDOW_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, but for the segments."""

    found: Found
    source: Source
    target: Target
    plan_id: str
    "hash over source identities, layouts and options"
    dropped: tuple[str, ...]
    "what the source holds and the target does not, by name"
    notes: tuple[str, ...]
    records: tuple[Record, ...]
    "storages of the source with the checksums that their files state"

    def file_name(self, mp: int, dp: int) -> str:
        options = self.target.options
        return target_name(options.prefix, mp=mp, dp=dp, num_mp=options.mesh.mp, flat=options.flat)

    def target_tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """List (name, shape of the whole, dtype) of the target's weights under the names that an unflat file has."""
        entries = [entry for slot in self.target.slots if not slot.state for entry in slot.entries]
        listed = {}
        for entry in entries:
            shape = self.source.tensors[entry.members[0]].shape
            whole = (shape[0] * len(entry.members), *shape[1:]) if shape else shape
            listed[entry.name] = (entry.name, whole, self.target.dtypes[entry.members[0]])
        for name, repeated in self.target.ties:
            listed[repeated] = (repeated, *listed[name][1:])
        return sorted(listed.values(), key=lambda item: self.source.family.order(item[0]))

    def bytes_to_write(self) -> int:
        """Estimate the size of all target files: their storages, without what stands around them."""
        mesh = self.target.options.mesh
        layout, _ = target_slice(self.source, self.target, 0)
        part = sum(s.chunk * len(s.files) * ITEM_SIZE_BYTES[s.dtype] for s in layout.streams)
        return part * mesh.mp

    def num_pieces(self, url: str, piece_bytes: int, num_files: int) -> int:
        """Return into how many pieces each of so many target files at `url` is cut, where they are written together.

        None where a file cannot be cut, or is written alone and is no larger than one.
        """
        file_bytes = self._file_bytes()
        unit_bytes = storage.unit_bytes(url, file_bytes)
        if unit_bytes is None:
            return 0
        # Each cut leaves a unit of each file to be made without the others, so a group is not cut for a little more.
        wanted = -(-file_bytes // piece_bytes) if num_files == 1 else file_bytes * num_files // piece_bytes
        count = max(1, min(wanted, file_bytes // unit_bytes))
        return 0 if (count, num_files) == (1, 1) else count

    def groups(self, url: str, memory_bytes: int) -> list[list[tuple[int, int]]]:
        """Return the target files as groups of those that take columns of the same rows of the source.

        A group is no larger than a worker's memory allows.
        """
        siblings, together = self._num_siblings(), self._num_together(url, memory_bytes)
        return [
            [(mp, dp) for mp in range(begin + first, min(begin + first + together, begin + siblings))]
            for dp in range(self.target.options.mesh.dp)
            for begin in range(0, self.target.options.mesh.mp, siblings)
            for first in range(0, siblings, together)
        ]

    def still_repeated(self, url: str, memory_bytes: int) -> float:
        """Return which part of the repeated reading of rows is left where files are written in groups."""
        siblings, together = self._num_siblings(), self._num_together(url, memory_bytes)
        return (-(-siblings // together) - 1) / (siblings - 1) if siblings > 1 else 1.0

    def _num_siblings(self) -> int:
        """Return how many target parts take columns of one source part's rows: M / gcd(N, M)."""
        mesh = self.target.options.mesh
        return mesh.mp // math.gcd(mesh.mp, self.source.mesh.mp)

    def _num_together(self, url: str, memory_bytes: int) -> int:
        """Return how many of them are written at the same time."""
        file_bytes = self._file_bytes()
        if storage.unit_bytes(url, file_bytes) is None:
            return 1
        return max(
            (
                num_files
                for num_files in range(2, self._num_siblings() + 1)
                if projected_memory_bytes(url, file_bytes, _SHARED_WINDOW_BYTES, num_files) <= memory_bytes
            ),
            default=1,
        )

    def _file_bytes(self) -> int:
        return self.bytes_to_write() // len(self.ranks())

    def ranks(self) -> list[tuple[int, int]]:
        mesh = self.target.options.mesh
        return [(mp, dp) for mp in range(mesh.mp) for dp in range(mesh.dp)]


def index_here(files: Sequence[ShardFile]) -> list[ShardIndex]:
    """Index files in this process, several at a time."""
    with ThreadPoolExecutor(min(_INDEX_THREADS, len(files))) as pool:
        return list(pool.map(lambda file: unflatten_source_shard(file.identity, file.mp, file.dp), files))


def make_plan(request: Request, found: Found, indexes: Sequence[ShardIndex]) -> Plan:
    """Put the plan together; raise everything that forbids it, at once."""
    source, problems = build_source(indexes, found.mesh, OPT, fused=request.source_fused)
    if source is None:
        raise_if(problems)
        raise error(ErrorKind.PLAN, "no-source", "the source could not be put together")
    state = sorted({part.name for index in indexes for part in index.training_state})
    if request.keep_state:
        order = {identity: number for number, identity in enumerate(source.files)}
        in_order = sorted(indexes, key=lambda index: order[index.identity]) if state else []
        problems += [problem for index in in_order for problem in index.state_problems]
        if state and not problems:
            source, problems = add_state(source, in_order)
    options = _options(request, found, source)
    problems += _prefix_faults(options)
    if not options.flat and options.mesh.dp > 1:
        message = f"an unflat target has one file for each model-parallel part, not {options.mesh.dp}"
        problems.append(Problem(ErrorKind.PLAN, "unflat-shards", message, hint="pass --dp 1, or --layout flat"))
    if request.replica_part is not None and request.replica_part >= source.mesh.mp:
        message = f"--replica-part {request.replica_part}: the source has parts 0 to {source.mesh.mp - 1}"
        problems.append(Problem(ErrorKind.USAGE, "no-such-part", message, hint="choose one of these"))
    problems += _memory_faults(request, source, options)
    target, more = plan_target(source, options)
    problems += more
    raise_if(problems)
    if target is None:
        raise error(ErrorKind.PLAN, "no-target", "the target could not be planned")
    return Plan(
        found=found,
        source=source,
        target=target,
        plan_id=_plan_id(source, options, request),
        dropped=_dropped([] if request.keep_state else state, indexes, source, options),
        notes=_notes(found, indexes, source, options),
        records=_records(source, indexes),
    )


def _records(source: Source, indexes: Sequence[ShardIndex]) -> tuple[Record, ...]:
    numbers = {identity: number for number, identity in enumerate(source.files)}
    return tuple(
        Record(
            numbers[index.identity],
            tensor.offset_bytes,
            math.prod(tensor.shape) * ITEM_SIZE_BYTES[tensor.dtype],
            tensor.crc32,
            name,
        )
        for index in indexes
        for name, tensor in _stored(index)
        if tensor.crc32  # 0: the writer left it out
    )


def _stored(index: ShardIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Yield everything in a file that a plan may read, with a name for messages."""
    for tensor in index.tensors:
        yield tensor.name, tensor
    for state in index.optimizer.parameters if index.optimizer else ():
        for moment, tensor in state.moments:
            yield f"{moment} of the optimizer's parameter {state.number}", tensor
    for key, tensors in index.averages:
        for tensor in tensors:
            yield f"extra_state.{key}.{tensor.name}", tensor


def _prefix_faults(options: TargetOptions) -> list[Problem]:
    """Refuse a prefix with which the target's files would not be found again."""
    name = target_name(options.prefix, mp=0, dp=0, num_mp=options.mesh.mp, flat=options.flat)
    parsed = parse(name)
    if parsed is not None and parsed.prefix == options.prefix and name.isprintable():
        return []
    message = f"files named {name!r} could not be told to be of the checkpoint {options.prefix!r}"
    hint = "choose another --prefix: without a leading dot or underscore, -model_part-, -shard, _part or -rank-"
    return [Problem(ErrorKind.USAGE, "bad-prefix", message, hint=hint)]


def _memory_faults(request: Request, source: Source, options: TargetOptions) -> list[Problem]:
    """Hold what writing the largest file takes against the budget of a worker."""
    tensors = [*source.tensors.values(), *(source.state_tensors.values() if options.keep_state else ())]
    total = sum(math.prod(tensor.shape) * ITEM_SIZE_BYTES[tensor.dtype] for tensor in tensors)
    # Replicated tensors and what is not weights make files somewhat larger than an even share.
    largest = 2 * total // (options.mesh.mp * options.mesh.dp) if options.flat else 2 * total // options.mesh.mp
    needed = projected_memory_bytes(request.target, largest, _SMALLEST_WINDOW_BYTES)
    if request.memory_bytes >= needed:
        return []
    message = f"--memory {request.memory_bytes} bytes is too little for one worker"
    context = (f"needed: {needed} bytes; given: {request.memory_bytes} bytes",)
    hint = f"pass --memory {-(-needed // 2**20)}MiB"
    return [Problem(ErrorKind.PLAN, "memory-budget", message, context, hint)]


def _options(request: Request, found: Found, source: Source) -> TargetOptions:
    flat = source.flat if request.flat is None else request.flat
    # Unflat files have no data-parallel axis, so asking for them is asking for one shard.
    default_dp = source.mesh.dp if flat or request.flat is None else 1
    return TargetOptions(
        mesh=Mesh(request.mp or source.mesh.mp, request.dp or default_dp),
        flat=flat,
        prefix=request.prefix or found.prefix,
        dtype=request.dtype,
        projection=request.projection,
        heads=request.heads,
        keep_state=request.keep_state,
        moments_dtype=request.moments_dtype,
    )


def _plan_id(source: Source, options: TargetOptions, request: Request) -> str:
    facts = {
        "layout": LAYOUT_VERSION,
        "files": [asdict(identity) for identity in source.files],
        "ranks": source.file_ranks,
        "options": asdict(options),
        "state": request.keep_state,
        "replica_part": request.replica_part,
        "source_fused": request.source_fused,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _dropped(
    state: Sequence[str], indexes: Sequence[ShardIndex], source: Source, options: TargetOptions
) -> tuple[str, ...]:
    there = {part.name for index in indexes for part in index.other_tensors}
    lost = [name for name in dropped_state(source.mesh, options.mesh) if name in there]
    metadata = ["shard_metadata"] if not options.flat and any(index.metadata for index in indexes) else []
    return (*state, *lost, *metadata, *source.dropped)


def _notes(found: Found, indexes: Sequence[ShardIndex], source: Source, options: TargetOptions) -> tuple[str, ...]:
    notes = [f"left out: {name}" for name in found.ignored]
    there = {part.name for index in indexes for part in index.other_tensors}
    notes += [
        f"{name} is dropped: mp changes, and no part's state is right for the new parts"
        for name in dropped_state(source.mesh, options.mesh)
        if name in there
    ]
    if source.optimizer is not None and source.optimizer.scaled and source.mesh.mp > 1:
        notes.append("moments with factors are rounded in each part for itself: those of the nearest part are taken")
    if source.inferred:
        notes.append("there is no shard_metadata: the layout was inferred from cfg, and fits to the last element")
    heads = options.heads or (source.config.heads if source.config else None)
    if heads is None and options.mesh.mp > source.mesh.mp:
        notes.append(
            "the source has no cfg: that --mp keeps attention heads whole was not checked (--heads N checks it)"
        )
    return tuple(notes)
