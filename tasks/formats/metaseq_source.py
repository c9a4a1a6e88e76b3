"""Pure. Puts the shard indexes of a metaseq checkpoint together: what each part holds, and everything that contradicts.

All faults that can be seen without reading tensor bytes are found here and returned together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tasks.checkpoint import FlatParameter, ModelConfig, ShardIndex, ShardMetadata, StoredTensor
from tasks.errors import ErrorKind, Problem
from tasks.family import Family, global_shape, local_box, some
from tasks.formats.metaseq_checks import coverage_problems, dimension_problems, find_ties, proven_equal
from tasks.formats.metaseq_infer import infer
from tasks.formats.metaseq_reader import canonical_name, is_flat_key
from tasks.layout import GlobalTensor, Mesh, Piece, SliceLayout, Stream, fsdp_chunk
from tasks.source import Padding, Source
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES


def build_source(
    indexes: Sequence[ShardIndex], mesh: Mesh, family: Family, *, fused: bool | None = None
) -> tuple[Source | None, list[Problem]]:
    """Combine the indexes of all files; return the source, or the problems that forbid it.

    Several files may be of one rank (fairseq's `_part{i}`): they must hold different tensors.
    """
    problems = [problem for index in indexes for problem in index.problems]
    if problems:
        return None, problems
    builder = _Builder(tuple(sorted(indexes, key=lambda index: (index.mp, index.dp))), mesh, family)
    parameters = builder.flat_parameters(fused)
    if not builder.problems:
        slices = tuple(builder.slice(mp, parameters) for mp in range(mesh.mp))
    if not builder.problems:
        builder.check_names()
    if not builder.problems:
        builder.check_coverage(slices)
    if builder.problems:
        return None, builder.problems
    return builder.finish(slices, parameters), []


@dataclass
class _Builder:
    indexes: tuple[ShardIndex, ...]
    mesh: Mesh
    family: Family
    problems: list[Problem] = field(default_factory=list)
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    entries: dict[str, tuple[int, ...]] = field(default_factory=dict)
    "shape on one part of every name as it stands in the files"
    first_seen: dict[str, str] = field(default_factory=dict)
    paddings: list[Padding] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    inferred: bool = False

    def fault(self, reference: str, message: str, *context: str, hint: str = "") -> None:
        self.problems.append(Problem(ErrorKind.SOURCE, reference, message, context, hint))

    # -- flat parameters

    def flat_parameters(self, fused: bool | None) -> tuple[FlatParameter, ...]:
        """Return the one description of flat parameters that all files share, stated or inferred."""
        stated = {index.metadata for index in self.indexes}
        has_flat = any(is_flat_key(tensor.name) for index in self.indexes for tensor in index.tensors)
        if len(stated) > 1:
            self._metadata_differ()
            return ()
        metadata = self.indexes[0].metadata
        if metadata is not None:
            if has_flat:
                self._check_stated(metadata)
            return metadata.flat_parameters
        if not has_flat:
            return ()
        self.inferred = True
        by_rank = {(index.mp, index.dp): self._flat_lengths(index) for index in self.indexes}
        lengths = by_rank[0, 0]
        for rank, other in by_rank.items():
            if other != lengths:
                odd = some(sorted(key for key in {*other, *lengths} if other.get(key) != lengths.get(key)))
                self.fault(
                    "shapes-disagree",
                    f"flat parameters of mp={rank[0]}, dp={rank[1]} differ from those of mp=0, dp=0: {odd}",
                    hint="the files are of different checkpoints, or damaged",
                )
                return ()
        found, problems = infer(lengths, num_mp=self.mesh.mp, num_dp=self.mesh.dp, config=self.config, fused=fused)
        self.problems += problems
        return found

    def _flat_lengths(self, index: ShardIndex) -> dict[str, int]:
        return {t.name: math.prod(t.shape) for t in index.tensors if is_flat_key(t.name)}

    def _metadata_differ(self) -> None:
        first = self.indexes[0]
        other = next(index for index in self.indexes if index.metadata != first.metadata)
        self.fault(
            "metadata-differ",
            f"shard_metadata of {other.label} differs from that of {first.label}",
            hint="the files are of different checkpoints: pass those of one",
        )

    def _check_stated(self, metadata: ShardMetadata) -> None:
        keys = {parameter.key for parameter in metadata.flat_parameters}
        for index in self.indexes:
            found = set(self._flat_lengths(index))
            if found != keys:
                odd = some(sorted(found ^ keys))
                self.fault(
                    "missing-tensors",
                    f"{index.label}: its flat parameters are not those that its shard_metadata names: {odd}",
                    hint="the file is damaged or was edited: save or copy it again",
                )
        for parameter in metadata.flat_parameters:
            if parameter.no_broadcast:
                self.fault(
                    "mixture-of-experts",
                    f"{parameter.key} belongs to one rank only (no_broadcast_optim_state): "
                    "expert weights of mixture-of-experts models cannot be resharded",
                    hint="mixture-of-experts checkpoints are not supported",
                )

    # -- what one part holds

    def slice(self, mp: int, parameters: Sequence[FlatParameter]) -> SliceLayout:
        pieces: list[Piece] = []
        streams: list[Stream] = []
        numbers = [number for number, index in enumerate(self.indexes) if index.mp == mp]
        flat_keys = {t.name for number in numbers for t in self.indexes[number].tensors if is_flat_key(t.name)}
        for position, parameter in enumerate(parameters):
            if parameter.key in flat_keys:
                stream = self._flat_stream(parameter, position, numbers)
                if stream is not None:
                    self._add(
                        mp,
                        zip(parameter.full_names(), parameter.shapes, strict=True),
                        stream,
                        pieces,
                        streams,
                        self.indexes[numbers[0]].label,
                    )
        by_rank: dict[int, dict[str, str]] = {}
        for number in numbers:
            index = self.indexes[number]
            seen = by_rank.setdefault(index.dp, {})
            for tensor in index.tensors:
                if is_flat_key(tensor.name):
                    continue
                if tensor.name in seen:
                    self.fault(
                        "duplicate-tensors",
                        f"{tensor.name} is in both {seen[tensor.name]} and {index.label}",
                        hint="take away the file that does not belong to this checkpoint",
                    )
                seen[tensor.name] = index.label
                stream = Stream(
                    tensor.dtype, math.prod(tensor.shape), math.prod(tensor.shape), (number,), (tensor.offset_bytes,)
                )
                self._add(mp, [(tensor.name, tensor.shape)], stream, pieces, streams, index.label)
        self._check_ranks(mp, by_rank)
        return SliceLayout(tuple(pieces), tuple(streams))

    def _check_ranks(self, mp: int, by_rank: Mapping[int, Mapping[str, str]]) -> None:
        first = by_rank.get(0, {})
        for dp, names in by_rank.items():
            if names.keys() != first.keys():
                odd = some(sorted(names.keys() ^ first.keys()))
                self.fault(
                    "missing-tensors",
                    f"mp={mp}, dp={dp} and mp={mp}, dp=0 hold different tensors: {odd}",
                    hint="the files are of different checkpoints, or damaged",
                )

    @cached_property
    def _by_name(self) -> list[dict[str, StoredTensor]]:
        return [{tensor.name: tensor for tensor in index.tensors} for index in self.indexes]

    def _flat_stream(self, parameter: FlatParameter, position: int, numbers: Sequence[int]) -> Stream | None:
        total = sum(math.prod(shape) for shape in parameter.shapes)
        chunk = fsdp_chunk(total, self.mesh.dp)
        offsets: list[int] = []
        dtypes: dict[str, str] = {}
        sound = True
        for number in numbers:
            index = self.indexes[number]
            tensor = self._by_name[number][parameter.key]
            stored = max(0, min(chunk, total - index.dp * chunk))
            padding = index.paddings[position] if index.paddings else chunk - stored
            length = math.prod(tensor.shape)
            if length != chunk or padding != chunk - stored:
                sound = False
                self.fault(
                    "wrong-shard-length",
                    f"{index.label}: {parameter.key} does not fit its parameters",
                    f"declared: {total} elements over {self.mesh.dp} shards are {chunk} a shard, {chunk - stored} of "
                    f"them padding in this one",
                    f"actual: {length} elements, padding {padding}",
                    hint="shards are missing at the end, or the files are of different checkpoints",
                )
            if padding and self.inferred:
                size = ITEM_SIZE_BYTES[tensor.dtype]
                self.paddings.append(
                    Padding(number, tensor.offset_bytes + stored * size, padding * size, parameter.key)
                )
            offsets.append(tensor.offset_bytes)
            dtypes.setdefault(tensor.dtype, index.label)
        if len(dtypes) > 1:
            self.fault(
                "dtypes-differ",
                f"{parameter.key} has several dtypes in the shards of one part",
                *(f"{dtype} in {label}" for dtype, label in dtypes.items()),
                hint="the files are of different checkpoints",
            )
        if not sound or len(dtypes) > 1:
            return None
        return Stream(next(iter(dtypes)), total, chunk, tuple(numbers), tuple(offsets))

    def _add(
        self,
        mp: int,
        named: Iterable[tuple[str, tuple[int, ...]]],
        stream: Stream,
        pieces: list[Piece],
        streams: list[Stream],
        label: str,
    ) -> None:
        """Add the pieces of the tensors that lie one after another in a stream."""
        offset = 0
        streams.append(stream)
        for stated, shape in named:
            name, size = canonical_name(stated, mp), math.prod(shape)
            if name is None:
                self.dropped.append(stated)
            else:
                self._add_entry(mp, name, shape, stream.dtype, len(streams) - 1, offset, pieces, label)
            offset += size

    def _add_entry(
        self,
        mp: int,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        stream: int,
        offset: int,
        pieces: list[Piece],
        label: str,
    ) -> None:
        known = self.entries.setdefault(name, shape)
        first = self.first_seen.setdefault(name, label)
        if known != shape:
            self.fault(
                "shapes-disagree",
                f"{name} has different shapes",
                f"{known} in {first}",
                f"{shape} in {label}",
                hint="the files are of different checkpoints, or a tensor was edited",
            )
            return
        found = self.family.find(name)
        if len(found) != 1:
            return  # check_names tells all of these together
        rule = self.family.rules[found[0]]
        members = self.family.members(name)
        if (rule.cut is not None and rule.cut >= len(shape)) or (shape and shape[0] % len(members)):
            self.fault(
                "shapes-disagree",
                f"{name} in {label} has shape {shape}, which its rule does not fit",
                f"declared: {len(members)} tensors one after another, cut along axis {rule.cut}",
                hint="the checkpoint is of another family, or the tensor was edited",
            )
            return
        local = (shape[0] // len(members), *shape[1:]) if shape else shape
        for position, member in enumerate(members):
            whole = global_shape(local, rule.cut, self.mesh.mp)
            tensor = self.tensors.setdefault(member, GlobalTensor(member, whole, dtype, rule.buffer))
            if tensor.dtype != dtype:
                self.fault(
                    "dtypes-differ",
                    f"{member} has dtype {dtype} in {label}, {tensor.dtype} elsewhere",
                    hint="the files are of different checkpoints",
                )
            box = local_box(whole, rule.cut, mp, self.mesh.mp)
            pieces.append(Piece(member, box, stream, offset + position * math.prod(local)))

    # -- the whole

    def check_names(self) -> None:
        self.problems += self.family.check_names(self.entries)
        both = sorted(name for name in self.entries if self.family.fused_name(name) in self.entries)
        if both:
            self.fault(
                "duplicate-tensors",
                f"tensors are there both fused and apart: {some(both)}",
                hint="the file was edited: keep one of the two",
            )

    def check_coverage(self, slices: Sequence[SliceLayout]) -> None:
        self.problems += coverage_problems(self.tensors, slices)
        self.problems += dimension_problems(self.tensors, self.mesh, self.family, self.config)

    @property
    def config(self) -> ModelConfig | None:
        return next((index.config for index in self.indexes if index.config), None)

    def finish(self, slices: tuple[SliceLayout, ...], parameters: tuple[FlatParameter, ...]) -> Source:
        ties, untested = find_ties(self.indexes, self.family, self.entries, self.config)
        flat = any(is_flat_key(tensor.name) for index in self.indexes for tensor in index.tensors)
        return Source(
            family=self.family,
            mesh=self.mesh,
            files=tuple(index.identity for index in self.indexes),
            file_ranks=tuple((index.mp, index.dp) for index in self.indexes),
            tensors=self.tensors,
            entries=tuple(sorted(self.entries, key=self.family.order)),
            slices=slices,
            flat_parameters=parameters,
            flat=flat,
            inferred=self.inferred,
            ties=ties,
            untested_ties=untested,
            paddings=tuple(self.paddings),
            config=self.config,
            proven_equal=proven_equal(self.indexes),
            dropped=tuple(sorted(set(self.dropped))),
        )
