"""Pure. The target checkpoint: which tensors each file gets, in what order, and what forbids it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.checkpoint import FlatParameter
from tasks.errors import ErrorKind, Problem
from tasks.family import local_box, some
from tasks.geometry import Box
from tasks.layout import Mesh, Piece, SliceLayout, Stream, fsdp_chunk
from tasks.source import Source


class Projection(StrEnum):
    """Whether k, v and q are one tensor."""

    KEEP = "keep"
    FUSED = "fused"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What was asked for, with nothing left to default."""

    mesh: Mesh
    flat: bool
    prefix: str
    dtype: str = ""
    "torch's name of the dtype that weights are cast to; empty: keep"
    projection: Projection = Projection.KEEP
    heads: int | None = None
    "attention heads, where cfg does not say"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as it stands in the target's files: one global tensor, or several fused along the first axis."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """An FSDP unit of the target: the entries glued into one flat parameter."""

    path: str
    key: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The plan of the target, the same for all of its files."""

    options: TargetOptions
    units: tuple[Unit, ...]
    "of a flat target, in FSDP's order; empty where unflat"
    named: tuple[Entry, ...]
    "tensors that stand under their own names: buffers, and in an unflat target all"
    ties: tuple[tuple[str, str], ...]
    dtypes: Mapping[str, str]
    "of each global tensor in the target"


def plan_target(source: Source, options: TargetOptions) -> tuple[Target | None, list[Problem]]:
    """Decide the target's tensors; return it, or the problems that forbid it."""
    repeats = {repeated for _, repeated in source.ties}
    entries = [entry for entry in _entries(source, options.projection) if entry.name not in repeats]
    dtypes = {name: _dtype(options.dtype, tensor.dtype, tensor.is_buffer) for name, tensor in source.tensors.items()}
    problems = _divisibility(source, options) + _cast_faults(source, options)
    units: tuple[Unit, ...] = ()
    named = entries
    if options.flat:
        named = [entry for entry in entries if source.tensors[entry.members[0]].is_buffer]
        glued = [entry for entry in entries if entry not in named]
        units = tuple(_units(source, glued, options.projection))
        problems += _mixed_dtypes(units, dtypes)
    if problems:
        return None, problems
    return Target(options, units, tuple(named), source.ties, dtypes), []


def target_slice(source: Source, target: Target, mp: int) -> SliceLayout:
    """Lay out one model-parallel part of the target.

    A stream's `files` are data-parallel ranks, and its offsets count from the start of a storage of its own. Streams
    stand in `storage_of_stream`'s order, with one copy of each named tensor for each data-parallel rank.
    """
    pieces: list[Piece] = []
    streams: list[Stream] = []
    num_dp = target.options.mesh.dp

    def add(entries: Sequence[Entry], ranks: Sequence[int]) -> None:
        offset = 0
        for entry in entries:
            for member in entry.members:
                box = member_box(source, target, member, mp)
                pieces.append(Piece(member, box, len(streams), offset))
                offset += box.num_elements
        dtype = target.dtypes[entries[0].members[0]]
        streams.append(Stream(dtype, offset, fsdp_chunk(offset, len(ranks)), tuple(ranks), (0,) * len(ranks)))

    for unit in target.units:
        add(unit.entries, range(num_dp))
    for entry in target.named:
        for rank in range(num_dp):
            add([entry], [rank])
    return SliceLayout(tuple(pieces), tuple(streams))


def storage_of_stream(target: Target, stream: int) -> int:
    """Return which storage of its file a stream of `target_slice` is: units first, then named tensors."""
    num_units = len(target.units)
    return stream if stream < num_units else num_units + (stream - num_units) // target.options.mesh.dp


def member_box(source: Source, target: Target, member: str, mp: int) -> Box:
    """Return the box of a global tensor that a part of the target holds."""
    rule = source.family.rule(member)
    return local_box(source.tensors[member].shape, rule.cut, mp, target.options.mesh.mp)


def entry_shape(source: Source, target: Target, entry: Entry) -> tuple[int, ...]:
    """Return the shape of an entry on one part of the target."""
    first = member_box(source, target, entry.members[0], 0).shape
    return (first[0] * len(entry.members), *first[1:]) if first else first


def entry_elements(source: Source, target: Target, entry: Entry) -> int:
    return math.prod(entry_shape(source, target, entry))


def _entries(source: Source, projection: Projection) -> list[Entry]:
    """List the entries in module order, fused or apart as asked for."""
    found: dict[str, Entry] = {}
    for name in source.entries:
        for stated in _renamed(source, name, projection):
            found.setdefault(stated, Entry(stated, source.family.members(stated)))
    return sorted(found.values(), key=lambda entry: source.family.order(entry.name))


def _renamed(source: Source, name: str, projection: Projection) -> tuple[str, ...]:
    if projection is Projection.SPLIT:
        return source.family.members(name)
    if projection is Projection.FUSED:
        return (source.family.fused_name(name) or name,)
    return (name,)


def _dtype(asked: str, stored: str, is_buffer: bool) -> str:
    return asked if asked and not is_buffer else stored


def _units(source: Source, entries: Sequence[Entry], projection: Projection) -> list[Unit]:
    """Group entries into FSDP units: as the source states them, else as the trainer would wrap the model."""
    by_name = {entry.name: entry for entry in entries}
    units = []
    for parameter in source.flat_parameters:
        names = [new for name in parameter.full_names() for new in _renamed(source, _modern(name), projection)]
        taken = [by_name.pop(name) for name in dict.fromkeys(names) if name in by_name]
        if taken:
            units.append(Unit(parameter.path, parameter.key, tuple(taken)))
    grouped: dict[str, list[Entry]] = {}
    wraps = _wraps_layers(source)
    for entry in by_name.values():
        layer = source.family.split_layer(entry.name)[0]
        # A block of layers is one unit: the path ends after the first number.
        path = ".".join(layer.split(".")[:3]) if layer and wraps else ""
        grouped.setdefault(path, []).append(entry)
    known = {unit.path for unit in units}
    for path in sorted(grouped, key=lambda path: source.family.order(grouped[path][0].name) if path else ()):
        if path in known:
            units = [
                Unit(unit.path, unit.key, unit.entries + tuple(grouped[path])) if unit.path == path else unit
                for unit in units
            ]
        else:
            units.append(Unit(path, f"{path}.flat_param_0" if path else "flat_param_0", tuple(grouped[path])))
    return units


def _modern(name: str) -> str:
    """Return the name that a legacy norm has in the target."""
    head, found, tail = name.partition(".lns.")
    return f"{head}.{tail.partition('.')[2]}" if found else name


def _wraps_layers(source: Source) -> bool:
    """Tell whether metaseq's trainer makes an FSDP unit of each layer (or block of layers), or one unit of everything.

    It wraps layers where activations are checkpointed, and else those of at least `min_params_to_wrap` parameters
    (`TransformerDecoder.build_decoder`).
    """
    config = source.config
    if config is None or not config.min_params_to_wrap or config.checkpoints_activations:
        return True
    layers: dict[str, int] = {}
    for name, tensor in source.tensors.items():
        layer = source.family.split_layer(name)[0]
        if layer:
            layers[layer] = layers.get(layer, 0) + math.prod(tensor.shape)
    return max(layers.values(), default=0) // source.mesh.mp >= config.min_params_to_wrap


def _divisibility(source: Source, options: TargetOptions) -> list[Problem]:
    num_mp = options.mesh.mp
    units: dict[tuple[str, int], list[str]] = {}
    heads = options.heads or (source.config.heads if source.config else None)
    for name, tensor in source.tensors.items():
        rule = source.family.rule(name)
        if rule.cut is None:
            continue
        size = tensor.shape[rule.cut]
        if rule.unit == "head" and heads and size % heads == 0:
            size = heads
        if size % num_mp:
            units.setdefault((rule.unit, size), []).append(name)
    problems = []
    for (unit, size), names in units.items():
        plural = {"vocabulary entry": "vocabulary entries"}.get(unit, f"{unit}s")
        problems.append(
            Problem(
                ErrorKind.PLAN,
                "not-divisible",
                f"{size} {plural} cannot be divided over {num_mp} model-parallel parts: {some(names, 3)}",
                hint=f"--mp may be one of {', '.join(map(str, possible_parts(source, heads)))}",
            )
        )
    return problems


def possible_parts(source: Source, heads: int | None = None) -> list[int]:
    """List the numbers of model-parallel parts that divide every tensor, and keep attention heads whole."""
    heads = heads or (source.config.heads if source.config else None)
    sizes = set()
    for name, tensor in source.tensors.items():
        rule = source.family.rule(name)
        if rule.cut is not None:
            sizes.add(heads if rule.unit == "head" and heads else tensor.shape[rule.cut])
    common = math.gcd(*sizes)
    return [n for n in range(1, min(common, 4096) + 1) if common % n == 0]


def _cast_faults(source: Source, options: TargetOptions) -> list[Problem]:
    if not options.dtype:
        return []
    odd = [
        f"{tensor.name} ({tensor.dtype})"
        for tensor in source.tensors.values()
        if not tensor.is_buffer and tensor.dtype not in ("float32", "float16", "bfloat16", "float64")
    ]
    if not odd:
        return []
    message = f"--dtype would cast weights that are not floating-point numbers: {some(odd)}"
    return [Problem(ErrorKind.PLAN, "dtype-surprise", message, hint="use --dtype keep")]


def _mixed_dtypes(units: Sequence[Unit], dtypes: Mapping[str, str]) -> list[Problem]:
    problems = []
    for unit in units:
        found: dict[str, list[str]] = {}
        for entry in unit.entries:
            for member in entry.members:
                found.setdefault(dtypes[member], []).append(member)
        if len(found) > 1:
            facts = tuple(f"{dtype}: {some(names, 3)}" for dtype, names in found.items())
            message = f"the FSDP unit {unit.path or 'at the root'!r} would glue tensors of several dtypes together"
            hint = "cast the weights to one with --dtype, or use --layout unflat"
            problems.append(Problem(ErrorKind.PLAN, "dtype-surprise", message, facts, hint))
    return problems


def flat_parameters(source: Source, target: Target) -> tuple[FlatParameter, ...]:
    """Describe the target's flat parameters, shapes as on one part."""
    return tuple(
        FlatParameter(
            unit.path,
            unit.key,
            tuple(entry.name.removeprefix(f"{unit.path}.") if unit.path else entry.name for entry in unit.entries),
            tuple(entry_shape(source, target, entry) for entry in unit.entries),
        )
        for unit in target.units
    )
