"""Pure. The target checkpoint: which tensors each file gets, in what order, and what forbids it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.checkpoint import FlatParameter
from tasks.errors import ErrorKind, Problem
from tasks.family import local_box, modern_name, some
from tasks.geometry import Box
from tasks.layout import Mesh, Piece, SliceLayout, Stream, fsdp_chunk, split_key, state_key
from tasks.source import Source
from tasks.target_checks import Glued, cast_faults, divisibility_faults, mixed_dtypes, number_faults, scale_faults


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
    keep_state: bool = False
    "optimizer and averages"
    moments_dtype: str = ""
    "torch's name of the dtype that moments are cast to, their own factors applied; empty: keep"


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


@dataclass(frozen=True, slots=True)
class Slot:
    """One storage of every target file: a flat parameter or a named tensor, of the weights or of a training state."""

    state: str
    unit: Unit | None
    entry: Entry | None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.unit.entries if self.unit else (self.entry,) if self.entry else ()


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The plan of the target, the same for all of its files."""

    options: TargetOptions
    units: tuple[Unit, ...]
    "of a flat target, in FSDP's order; empty where unflat"
    named: tuple[Entry, ...]
    "tensors that stand under their own names: buffers, and in an unflat target all"
    ties: tuple[tuple[str, str], ...]
    slots: tuple[Slot, ...]
    "weights first; a storage's place here is its number in the plan"
    dtypes: Mapping[str, str]
    "of each global tensor in the target, states by `layout.state_key`"

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.state for slot in self.slots if slot.state))


def plan_target(source: Source, options: TargetOptions) -> tuple[Target | None, list[Problem]]:
    """Decide the target's tensors; return it, or the problems that forbid it."""
    repeats = {repeated for _, repeated in source.ties}
    entries = [entry for entry in _entries(source, options.projection) if entry.name not in repeats]
    dtypes = {name: _dtype(options.dtype, tensor.dtype, tensor.is_buffer) for name, tensor in source.tensors.items()}
    problems = divisibility_faults(source, options.mesh.mp, options.heads) + cast_faults(source, options.dtype)
    units: tuple[Unit, ...] = ()
    named = entries
    if options.flat:
        named = [entry for entry in entries if source.tensors[entry.members[0]].is_buffer]
        glued = [entry for entry in entries if entry not in named]
        units = tuple(_units(source, glued, options.projection))
    slots = [Slot("", unit, None) for unit in units] + [Slot("", None, entry) for entry in named]
    if options.keep_state:
        more, found = _state_slots(source, slots)
        slots += more
        problems += scale_faults(source, options.flat, options.moments_dtype)
        problems += found + number_faults(source, (_glued(slot) for slot in slots if not slot.state))
        dtypes |= {key: _moment_dtype(source, options, key) for key in source.state_tensors}
    problems += mixed_dtypes((_glued(slot) for slot in slots), dtypes)
    if problems:
        return None, problems
    # One string object for each name: which strings are one object shows in the pickle, whatever the source was.
    spelled = {entry.name: entry.name for entry in entries}
    ties = tuple((spelled.get(name, name), repeated) for name, repeated in source.ties)
    return Target(options, units, tuple(named), ties, tuple(slots), dtypes), []


def _glued(slot: Slot) -> Glued:
    members = tuple(state_key(slot.state, member) for entry in slot.entries for member in entry.members)
    return f"{slot.state} {slot.unit.key if slot.unit else slot.entries[0].name}".strip(), members


def _state_slots(source: Source, weights: Sequence[Slot]) -> tuple[list[Slot], list[Problem]]:
    """List the storages of training state: for each state, those of the weights that have it."""
    slots = []
    problems = []
    for state in (*source.moments, *source.averages):
        for slot in weights:
            members = [member for entry in slot.entries for member in entry.members]
            held = [member for member in members if state_key(state, member) in source.state_tensors]
            if held and len(held) < len(members):
                lacking = some([member for member in members if member not in held], 3)
                problems.append(
                    Problem(
                        ErrorKind.PLAN,
                        "partial-state",
                        f"{slot.unit.key if slot.unit else members[0]} would glue parameters with and without {state}",
                        (f"without it: {lacking}",),
                        "use --layout unflat, or pass --state drop",
                    )
                )
            elif held:
                slots.append(Slot(state, slot.unit, slot.entry))
    return slots, problems


def _moment_dtype(source: Source, options: TargetOptions, key: str) -> str:
    state, _ = split_key(key)
    cast = options.moments_dtype and state in source.moments
    return options.moments_dtype if cast else source.state_tensors[key].dtype


def target_slice(source: Source, target: Target, mp: int) -> tuple[SliceLayout, tuple[int, ...]]:
    """Lay out one model-parallel part of the target; return with it the storage that each stream is.

    A stream's `files` are data-parallel ranks, and its offsets count from the start of a storage of its own. A named
    tensor has a stream for each data-parallel rank, since each file has a copy.
    """
    pieces: list[Piece] = []
    streams: list[Stream] = []
    storages: list[int] = []
    all_ranks = tuple(range(target.options.mesh.dp))
    for number, slot in enumerate(target.slots):
        for ranks in [all_ranks] if slot.unit else [(rank,) for rank in all_ranks]:
            offset = 0
            for entry in slot.entries:
                for member in entry.members:
                    box = member_box(source, target, member, mp)
                    pieces.append(Piece(state_key(slot.state, member), box, len(streams), offset))
                    offset += box.num_elements
            dtype = slot_dtype(target, slot)
            streams.append(Stream(dtype, offset, fsdp_chunk(offset, len(ranks)), ranks, (0,) * len(ranks)))
            storages.append(number)
    return SliceLayout(tuple(pieces), tuple(streams)), tuple(storages)


def slot_dtype(target: Target, slot: Slot) -> str:
    return target.dtypes[state_key(slot.state, slot.entries[0].members[0])]


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


def _renamed_in_order(source: Source, names: Sequence[str], projection: Projection) -> list[str]:
    """Rename the parameters of a unit; those that are new stand where the first of their layer stood, in module order.

    FSDP loads flat parameters by position: k's weight is followed by k's bias, not by v's weight.
    """
    renamed = {name: _renamed(source, name, projection) for name in names}
    found: dict[str, None] = {}
    for name in names:
        if renamed[name] == (name,):
            found.setdefault(name)
            continue
        layer = source.family.split_layer(name)[0]
        alike = [n for n in names if renamed[n] != (n,) and source.family.split_layer(n)[0] == layer]
        new = {item for other in alike for item in renamed[other]}
        found |= dict.fromkeys(sorted(new, key=source.family.order))
    return list(found)


def _dtype(asked: str, stored: str, is_buffer: bool) -> str:
    return asked if asked and not is_buffer else stored


def _units(source: Source, entries: Sequence[Entry], projection: Projection) -> list[Unit]:
    """Group entries into FSDP units: as the source states them, else as the trainer would wrap the model."""
    by_name = {entry.name: entry for entry in entries}
    units = []
    for parameter in source.flat_parameters:
        names = _renamed_in_order(source, [modern_name(name) for name in parameter.full_names()], projection)
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


def fsdp_units(source: Source, *, wrap: bool = True) -> tuple[Unit, ...]:
    """Return the FSDP units of the source as it is; `wrap=False`: all in one, in the order of the modules."""
    repeats = {repeated for _, repeated in source.ties}
    entries = [
        entry
        for entry in _entries(source, Projection.KEEP)
        if entry.name not in repeats and not source.tensors[entry.members[0]].is_buffer
    ]
    return tuple(_units(source, entries, Projection.KEEP)) if wrap else (Unit("", "", tuple(entries)),)


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
