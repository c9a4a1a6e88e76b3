"""Pure. What must be true of the parts of a metaseq checkpoint together, and which of its tensors repeat others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tasks.checkpoint import ModelConfig, ParameterState, ShardIndex, StoredTensor
from tasks.errors import ErrorKind, Problem
from tasks.family import Family, some
from tasks.formats.metaseq_reader import is_flat_key
from tasks.geometry import Box
from tasks.layout import GlobalTensor, Mesh, SliceLayout, tiling_faults
from tasks.torchfile.dtypes import ITEM_SIZE_BYTES

Pairs = tuple[tuple[str, str], ...]

# Attention's rows and columns are one number in the whole model: a missing or extra part shows in these.
_SQUARE = (".k_proj.weight", ".v_proj.weight", ".q_proj.weight", ".out_proj.weight")

STATE_HINT = "the files are of different checkpoints, or damaged; --state drop leaves the state out"
"what to do about training state that cannot be right"


def coverage_problems(tensors: Mapping[str, GlobalTensor], slices: Sequence[SliceLayout]) -> list[Problem]:
    """Prove that every part holds every tensor, and that the parts together hold each element exactly once."""
    boxes: dict[str, set[Box]] = {}
    holders: dict[str, set[int]] = {}
    for mp, part in enumerate(slices):
        for piece in part.pieces:
            boxes.setdefault(piece.tensor, set()).add(piece.box)
            holders.setdefault(piece.tensor, set()).add(mp)
    problems = []
    for name, tensor in tensors.items():
        absent = sorted(set(range(len(slices))) - holders[name])
        if absent:
            message = f"{name} is not in the model-parallel parts {absent}"
            hint = "the files are of different checkpoints, or damaged"
            problems.append(Problem(ErrorKind.SOURCE, "missing-tensors", message, hint=hint))
        elif faults := tiling_faults(tensor.shape, list(boxes[name])):
            message = f"{name} is not covered exactly once by the parts"
            hint = "the files are of different checkpoints, or damaged"
            problems.append(Problem(ErrorKind.SOURCE, "not-covered", message, tuple(faults), hint))
    return problems


def dimension_problems(
    tensors: Mapping[str, GlobalTensor], mesh: Mesh, family: Family, config: ModelConfig | None
) -> list[Problem]:
    """Hold the shapes of the whole against each other, and against what cfg says of the model."""
    problems = []
    for name, tensor in tensors.items():
        if name.endswith(_SQUARE) and len(tensor.shape) == 2 and tensor.shape[0] != tensor.shape[1]:
            message = f"{name} comes out as {tensor.shape} from {mesh.mp} model-parallel parts; it must be square"
            hint = "parts are missing, or too many: pass the whole checkpoint"
            problems.append(Problem(ErrorKind.SOURCE, "wrong-number-of-parts", message, hint=hint))
    return problems + _layer_problems(tensors, family, config)


def _layer_problems(tensors: Mapping[str, GlobalTensor], family: Family, config: ModelConfig | None) -> list[Problem]:
    """Layers are alike and numbered without a gap: a tensor or a layer that is missing everywhere shows here."""
    layers: dict[tuple[int, ...], set[str]] = {}
    for name in tensors:
        _, rest, numbers = family.split_layer(name)
        if numbers:
            layers.setdefault(numbers, set()).add(rest)
    every = set().union(*layers.values())
    problems = []
    for numbers, names in sorted(layers.items()):
        if lacking := sorted(every - names):
            full = [f"decoder.layers.{'.layers.'.join(map(str, numbers))}.{name}" for name in lacking]
            message = f"layer {'.'.join(map(str, numbers))} lacks tensors that other layers have: {some(full)}"
            hint = "the checkpoint is incomplete: save or copy it again"
            problems.append(Problem(ErrorKind.SOURCE, "missing-tensors", message, hint=hint))
    gaps = _gaps(layers)
    if gaps:
        message = f"layers are missing: {some([f'decoder.layers.{gap}' for gap in gaps])}"
        hint = "the checkpoint is incomplete: save or copy it again"
        problems.append(Problem(ErrorKind.SOURCE, "missing-tensors", message, hint=hint))
    if config is not None and config.layers is not None and len(layers) != config.layers:
        message = f"cfg says {config.layers} layers, the files hold {len(layers)}"
        hint = "the checkpoint is incomplete, or its cfg is of another model"
        problems.append(Problem(ErrorKind.SOURCE, "missing-tensors", message, hint=hint))
    return problems


def _gaps(layers: Collection[tuple[int, ...]]) -> list[str]:
    """List the numbers that are missing from 0 on, in the whole and in each block of layers."""
    by_block: dict[tuple[int, ...], set[int]] = {}
    for numbers in layers:
        for depth in range(len(numbers)):
            by_block.setdefault(numbers[:depth], set()).add(numbers[depth])
    return [
        ".".join(map(str, (*block, number)))
        for block, found in sorted(by_block.items())
        for number in range(max(found))
        if number not in found
    ]


def scalar_problems(indexes: Sequence[ShardIndex]) -> list[Problem]:
    """Refuse files that disagree about steps and groups: each target takes them from one of the files."""
    first: dict[int, tuple[ParameterState, str]] = {}
    groups: dict[tuple[tuple[int, ...], ...], str] = {}
    held: dict[tuple[tuple[int, tuple[str, ...]], ...], str] = {}
    faults: list[tuple[str, tuple[str, ...]]] = []
    for index in indexes:
        if index.optimizer is None:
            continue
        groups.setdefault(index.optimizer.groups, index.label)
        what = tuple(sorted((s.number, tuple(name for name, _ in s.moments)) for s in index.optimizer.parameters))
        held.setdefault(what, index.label)
        for state in index.optimizer.parameters:
            known, label = first.setdefault(state.number, (state, index.label))
            if known.scalars != state.scalars:
                message = f"the optimizer's state of parameter {state.number} differs between files"
                facts = (f"{dict(known.scalars)} in {label}", f"{dict(state.scalars)} in {index.label}")
                faults.append((message, facts))
    if len(held) > 1:
        files = some(list(held.values()))
        message = f"the optimizer's state is of different parameters or moments in these files: {files}"
        faults.append((message, ()))
    if len(groups) > 1:
        faults.append((f"param_groups differ between files: {some(list(groups.values()))}", ()))
    return [
        Problem(ErrorKind.SOURCE, "optimizer-states-differ", message, facts, STATE_HINT) for message, facts in faults
    ]


def proven_equal(indexes: Sequence[ShardIndex]) -> frozenset[str]:
    """Name the tensors whose stored checksums prove all copies equal: CRC32 is one to one up to four bytes."""
    seen: dict[str, set[tuple[int | None, bool]]] = {}
    for index in indexes:
        for tensor in index.tensors:
            size = math.prod(tensor.shape) * ITEM_SIZE_BYTES[tensor.dtype]
            seen.setdefault(tensor.name, set()).add((tensor.crc32 or None, size <= 4))
    return frozenset(name for name, found in seen.items() if len(found) == 1 and all(map(all, found)))


def find_ties(
    indexes: Sequence[ShardIndex], family: Family, names: Collection[str], config: ModelConfig | None
) -> tuple[Pairs, Pairs]:
    """Find which tensors repeat others: stated, by one storage, or by cfg, or by equal checksums where cfg is silent.

    Returns (all ties, those between two stored copies whose bytes are still to be compared), as pairs of a name and
    the name that repeats it.
    """
    metadata = indexes[0].metadata
    ties = {repeated: name for name, repeated in metadata.shared if name in names} if metadata else {}
    untested = {}
    says = config.ties_embeddings if config else None
    for rule in family.rules:
        name = rule.pattern.replace("\\", "")
        if not rule.tied_to or rule.tied_to not in names:
            continue
        if name in names:
            kind = _stored_tie(indexes, rule.tied_to, name, says)
            if kind:
                ties[name] = rule.tied_to
            if kind == "copy":
                untested[name] = rule.tied_to
        elif says and metadata is None and any(is_flat_key(tensor.name) for tensor in indexes[0].tensors):
            ties[name] = rule.tied_to  # FSDP keeps one of two tied parameters
    return tuple((a, b) for b, a in ties.items()), tuple((a, b) for b, a in untested.items())


def _stored_tie(indexes: Sequence[ShardIndex], name: str, repeated: str, tied_by_config: bool | None) -> str:
    """Tell how two stored tensors are tied: as a 'view' of one storage, as a 'copy', or '' where they are not."""
    pairs: list[tuple[StoredTensor, StoredTensor]] = []
    for index in indexes:
        stored = {tensor.name: tensor for tensor in index.tensors}
        if name in stored and repeated in stored:
            pairs.append((stored[name], stored[repeated]))
    if pairs and all(_place(a) == _place(b) for a, b in pairs):
        return "view"
    equal = bool(pairs) and all(a.crc32 and a.crc32 == b.crc32 and a.shape == b.shape for a, b in pairs)
    return "copy" if tied_by_config or (tied_by_config is None and equal) else ""


def _place(tensor: StoredTensor) -> tuple[str, int, tuple[int, ...]]:
    return tensor.storage, tensor.storage_offset, tensor.shape
