"""Pure. Adds the training state of all files to a source: which box of which moment or average lies where.

A moment has an element for each element of its parameter, in the same order, so it has the parameter's pieces on
streams of its own. What is one number for each parameter (step) must be the same in all files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tasks.checkpoint import OptimizerIndex, ShardIndex, StoredTensor
from tasks.errors import ErrorKind, Problem
from tasks.family import local_box, modern_name, some
from tasks.formats.metaseq_checks import STATE_HINT, coverage_problems, scalar_problems
from tasks.formats.metaseq_reader import canonical_name, is_flat_key
from tasks.layout import GlobalTensor, Piece, SliceLayout, Stream, fsdp_chunk, state_key
from tasks.source import OptimizerLayout, Source
from tasks.target import fsdp_units

Named = tuple[tuple[str, tuple[int, ...]], ...]
"(name, shape on one part) of parameters that lie one after another"


def add_state(source: Source, indexes: Sequence[ShardIndex]) -> tuple[Source, list[Problem]]:
    """Return the source with its training state, and what is wrong there. `indexes` are in order of `source.files`."""
    builder = _Builder(source, tuple(indexes))
    slices = tuple(builder.slice(mp) for mp in range(source.mesh.mp))
    builder.problems += scalar_problems(builder.indexes)
    if not builder.problems:
        builder.problems += coverage_problems(
            builder.tensors, [builder.state_only(part, mp) for mp, part in enumerate(slices)]
        )
    averages = tuple(dict.fromkeys(key for index in indexes for key, _ in index.averages))
    for name, repeated in source.ties:
        for key in averages:
            if state_key(key, repeated) in builder.tensors and state_key(key, name) not in builder.tensors:
                builder.fault("missing-tensors", f"extra_state.{key} has {repeated}, but not {name}, which it repeats")
    if builder.problems:
        return source, builder.problems
    return replace(
        source,
        slices=slices,
        state_tensors=builder.tensors,
        moments=tuple(builder.moments),
        averages=averages,
        untested_ties=(*source.untested_ties, *_tied_averages(source, builder.tensors, averages)),
        optimizer=builder.layout(),
    ), []


def _tied_averages(
    source: Source, tensors: Mapping[str, GlobalTensor], averages: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield the averages of tied weights that are stored twice: their bytes must be equal, as those of the weights."""
    for key in averages:
        for name, repeated in source.ties:
            if state_key(key, repeated) in tensors:
                yield state_key(key, name), state_key(key, repeated)


@dataclass
class _Builder:
    source: Source
    indexes: tuple[ShardIndex, ...]
    problems: list[Problem] = field(default_factory=list)
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    moments: dict[str, None] = field(default_factory=dict)
    covered: dict[int, tuple[str, ...]] = field(default_factory=dict)
    "names of the parameters that each of the optimizer's ids stands for"
    scaled: bool = False

    def fault(self, reference: str, message: str, *context: str, hint: str = "") -> None:
        self.problems.append(Problem(ErrorKind.SOURCE, reference, message, context, hint or STATE_HINT))

    def slice(self, mp: int) -> SliceLayout:
        """Return a part's layout with the state's pieces behind the weights'."""
        part = self.source.slices[mp]
        pieces, streams = list(part.pieces), list(part.streams)
        numbers = [number for number, index in enumerate(self.indexes) if index.mp == mp]
        holders = [number for number in numbers if self.indexes[number].optimizer is not None]
        first = self.indexes[holders[0]].optimizer if holders else None
        if first is not None and (first.id_map is not None or not self.source.flat):
            self._unsharded(mp, holders, first, pieces, streams)
        elif first is not None:
            self._sharded(mp, numbers, holders, first, pieces, streams)
        for key in dict.fromkeys(key for number in numbers for key, _ in self.indexes[number].averages):
            self._average(mp, key, numbers, pieces, streams)
        return SliceLayout(tuple(pieces), tuple(streams))

    def state_only(self, part: SliceLayout, mp: int) -> SliceLayout:
        return SliceLayout(part.pieces[len(self.source.slices[mp].pieces) :], part.streams)

    # -- moments

    def _sharded(
        self,
        mp: int,
        numbers: list[int],
        holders: list[int],
        first: OptimizerIndex,
        pieces: list[Piece],
        streams: list[Stream],
    ) -> None:
        if holders != numbers:
            odd = some([self.indexes[number].label for number in numbers if number not in holders])
            self.fault("missing-optimizer-state", f"only some shards of part {mp} hold optimizer state; not so {odd}")
            return
        parameters = self.source.flat_parameters
        if not self._check_ids(first, range(len(parameters)), "flat parameters"):
            return
        for state in first.parameters:
            parameter = parameters[state.number]
            named = tuple(zip(parameter.full_names(), parameter.shapes, strict=True))
            self.covered[state.number] = parameter.full_names()
            for moment, _ in state.moments:
                found = [self._moment(number, state.number, moment) for number in numbers]
                label = f"{moment} of {parameter.key} in part {mp}"
                self._add_flat(mp, moment, label, named, numbers, found, pieces, streams)

    def _moment(self, number: int, parameter: int, moment: str) -> tuple[StoredTensor | None, float | None]:
        moments, scales = self._held[number].get(parameter, ({}, {}))
        return moments.get(moment), scales.get(moment)

    @cached_property
    def _held(self) -> list[dict[int, tuple[dict[str, StoredTensor], dict[str, float]]]]:
        """For each file, the moments and factors of each of the optimizer's ids."""
        return [
            {state.number: (dict(state.moments), dict(state.scales)) for state in index.optimizer.parameters}
            if index.optimizer
            else {}
            for index in self.indexes
        ]

    def _add_flat(
        self,
        mp: int,
        state: str,
        label: str,
        named: Named,
        numbers: list[int],
        found: Sequence[tuple[StoredTensor | None, float | None]],
        pieces: list[Piece],
        streams: list[Stream],
    ) -> None:
        """Add the pieces of a flat parameter's state: every shard must have the length of the parameter's own."""
        total = sum(math.prod(shape) for _, shape in named)
        chunk = fsdp_chunk(total, self.source.mesh.dp)
        lengths = {None if tensor is None else math.prod(tensor.shape) for tensor, _ in found}
        dtypes = {tensor.dtype for tensor, _ in found if tensor is not None}
        if lengths != {chunk} or len(dtypes) != 1:
            context = (
                f"declared: {chunk} elements in every shard",
                f"actual: {sorted(map(str, lengths))} of {sorted(dtypes)}",
            )
            files = some([self.indexes[number].label for number in numbers], 3)
            self.fault("wrong-state-length", f"{label} does not fit its parameter, in {files}", *context)
            return
        offsets = tuple(tensor.offset_bytes for tensor, _ in found if tensor is not None)
        scales = tuple(scale for _, scale in found if scale is not None)
        if scales and len(scales) != len(found):
            self.fault("missing-optimizer-state", f"{label}: only some shards have a scale")
            return
        self.scaled |= bool(scales)
        streams.append(Stream(dtypes.pop(), total, chunk, tuple(numbers), offsets, scales))
        self._add_pieces(mp, state, named, len(streams) - 1, streams[-1].dtype, label, pieces)

    def _unsharded(
        self, mp: int, holders: list[int], first: OptimizerIndex, pieces: list[Piece], streams: list[Stream]
    ) -> None:
        """Add the state of named parameters, which one file of the part holds whole."""
        if len(holders) > 1:
            odd = some([self.indexes[number].label for number in holders])
            self.fault(
                "duplicate-optimizer-state", f"unsharded optimizer state of part {mp} is in several files: {odd}"
            )
            return
        names = self._names(first)
        unknown = sorted(name for name in names.values() if modern_name(name) not in self.source.entries)
        if unknown:
            self.fault("bad-optimizer-state", f"the optimizer names parameters that the model has not: {some(unknown)}")
            return
        if not self._check_ids(first, names, "parameters"):
            return
        for state in first.parameters:
            name = names[state.number]
            self.covered[state.number] = (name,)
            for moment, tensor in state.moments:
                self._add_named(mp, moment, name, tensor, holders[0], dict(state.scales).get(moment), pieces, streams)

    def _check_ids(self, index: OptimizerIndex, expected: Collection[int], what: str) -> bool:
        """Hold the optimizer's ids against the parameters: torch numbers those it was given, through all its groups.

        An optimizer of some of the parameters, or of several groups, numbers others than the model does: which
        parameters its ids are is known only where the file names them.
        """
        listed = [number for group in index.groups for number in group]
        hint = "pass --state drop; the moments would go to the wrong parameters"
        if len(set(listed)) != len(listed) or set(listed) != set(expected):
            self.fault(
                "optimizer-ids",
                f"the optimizer's param_groups are not of all {what}, each once",
                f"declared: ids {_listed(sorted(expected))}; actual: {_listed(listed)}",
                hint=hint,
            )
            return False
        if len(index.groups) > 1 and not index.names:
            message = f"the optimizer has {len(index.groups)} groups, and nothing tells which {what} its ids are"
            self.fault("optimizer-ids", message, hint=hint)
            return False
        odd = sorted({state.number for state in index.parameters} - set(listed))
        if odd:
            self.fault("optimizer-ids", f"the optimizer has state for ids that no group has: {_listed(odd)}", hint=hint)
        return not odd

    def _names(self, index: OptimizerIndex) -> dict[int, str]:
        """Name the ids: as the file states, else in the order in which FSDP units hold parameters."""
        if index.names:
            return dict(index.names)
        if index.id_map is None:
            ordered = [entry.name for unit in fsdp_units(self.source, wrap=False) for entry in unit.entries]
        else:
            ordered = [entry.name for unit in fsdp_units(self.source) for entry in unit.entries]
        return dict(enumerate(ordered))

    def _add_named(
        self,
        mp: int,
        state: str,
        name: str,
        tensor: StoredTensor,
        number: int,
        scale: float | None,
        pieces: list[Piece],
        streams: list[Stream],
    ) -> None:
        size = math.prod(tensor.shape)
        scales = () if scale is None else (scale,)
        self.scaled |= bool(scales)
        streams.append(Stream(tensor.dtype, size, size, (number,), (tensor.offset_bytes,), scales))
        label = f"{state} of {name} in {self.indexes[number].label}"
        self._add_pieces(mp, state, ((name, tensor.shape),), len(streams) - 1, tensor.dtype, label, pieces)

    def _average(self, mp: int, key: str, numbers: list[int], pieces: list[Piece], streams: list[Stream]) -> None:
        flat_parameters = {parameter.key: parameter for parameter in self.source.flat_parameters}
        # Several files of one rank (`_part{i}`) hold different tensors of it.
        by_rank: dict[int, dict[str, tuple[int, StoredTensor]]] = {}
        for number in numbers:
            rank = by_rank.setdefault(self.indexes[number].dp, {})
            for tensor in dict(self.indexes[number].averages).get(key, ()):
                if tensor.name in rank:
                    where = self.indexes[number].label
                    self.fault(
                        "duplicate-tensors", f"extra_state.{key}: {tensor.name} is in several files, as in {where}"
                    )
                rank[tensor.name] = number, tensor
        ranks = [by_rank[dp] for dp in sorted(by_rank)]
        if len({tuple(sorted(rank)) for rank in ranks}) > 1:
            self.fault("missing-tensors", f"extra_state.{key} has different tensors in the shards of part {mp}")
            return
        for name in ranks[0]:
            if not is_flat_key(name):
                for rank in ranks:
                    number, tensor = rank[name]
                    self._add_named(mp, key, name, tensor, number, None, pieces, streams)
            elif name in flat_parameters:
                named = tuple(zip(flat_parameters[name].full_names(), flat_parameters[name].shapes, strict=True))
                found = [(rank[name][1], None) for rank in ranks]
                label = f"extra_state.{key}: {name} in part {mp}"
                self._add_flat(mp, key, label, named, [rank[name][0] for rank in ranks], found, pieces, streams)
            else:
                self.fault("missing-tensors", f"extra_state.{key} has {name}, which the model has not")

    def _add_pieces(
        self,
        mp: int,
        state: str,
        named: Iterable[tuple[str, tuple[int, ...]]],
        stream: int,
        dtype: str,
        label: str,
        pieces: list[Piece],
    ) -> None:
        """Add the state of parameters that lie one after another in a stream; shapes are those of the weights."""
        offset = 0
        for stated, shape in named:
            name = canonical_name(stated, mp)
            size = math.prod(shape)
            if name is not None:
                members = self.source.family.members(name)
                local = (shape[0] // len(members), *shape[1:]) if shape else shape
                for position, member in enumerate(members):
                    self._add_piece(
                        mp, state, member, local, stream, offset + position * math.prod(local), dtype, label, pieces
                    )
            offset += size

    def _add_piece(
        self,
        mp: int,
        state: str,
        member: str,
        local: tuple[int, ...],
        stream: int,
        offset: int,
        dtype: str,
        label: str,
        pieces: list[Piece],
    ) -> None:
        weight = self.source.tensors.get(member)
        if weight is None:
            self.fault("missing-tensors", f"{label}: the model has no tensor {member}")
            return
        box = local_box(weight.shape, self.source.family.rule(member).cut, mp, self.source.mesh.mp)
        if box.shape != local:
            self.fault("shapes-disagree", f"{label} has shape {local}, its weight {box.shape}")
            return
        key = state_key(state, member)
        if not weight.is_buffer and state not in self._average_keys:
            self.moments.setdefault(state)
        known = self.tensors.setdefault(key, GlobalTensor(key, weight.shape, dtype, weight.is_buffer))
        if known.dtype != dtype:
            self.fault("dtypes-differ", f"{label} has dtype {dtype}, {known.dtype} elsewhere")
        pieces.append(Piece(key, box, stream, offset))

    @cached_property
    def _average_keys(self) -> frozenset[str]:
        return frozenset(key for index in self.indexes for key, _ in index.averages)

    # -- what is one number

    def layout(self) -> OptimizerLayout | None:
        index = next((index.optimizer for index in self.indexes if index.optimizer is not None), None)
        if index is None:
            return None
        group_of = {number: group for group, ids in enumerate(index.groups) for number in ids}
        names = self._all_names(index)
        states = {state.number: state for state in index.parameters}
        return OptimizerLayout(
            ids={modern_name(name): number for number, covered in names.items() for name in covered},
            groups={number: group_of.get(number, 0) for number in names},
            with_state=frozenset(states),
            scalars={number: state.scalars for number, state in states.items()},
            num_groups=len(index.groups),
            holders=tuple(
                next(n for n, index in enumerate(self.indexes) if index.mp == mp and index.optimizer is not None)
                for mp in range(self.source.mesh.mp)
            ),
            scaled=self.scaled,
        )

    def _all_names(self, index: OptimizerIndex) -> dict[int, tuple[str, ...]]:
        """Return what every id stands for, state or not."""
        if index.id_map is not None or not self.source.flat:
            return {number: (name,) for number, name in self._names(index).items()}
        return {number: parameter.full_names() for number, parameter in enumerate(self.source.flat_parameters)}


def _listed(numbers: Sequence[int]) -> str:
    return some([str(number) for number in numbers], 12) or "none"
