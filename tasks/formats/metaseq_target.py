"""Makes the objects of a target file: the source's own, with model, metadata and configuration made to fit.

Nothing is dropped but by name. What the source held and no rule here speaks of goes into the target unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.formats import config_tree
from tasks.formats.metaseq_reader import EMA_KEYS, OPTIMIZER_KEYS
from tasks.formats.metaseq_state_reader import OPTIMIZER_KEY, pack_number
from tasks.formats.metaseq_state_target import NumberOf, StateMaker, holds_optimizer
from tasks.layout import Mesh, fsdp_chunk
from tasks.source import Source
from tasks.target import Target, entry_elements, entry_shape, flat_parameters, slot_dtype
from tasks.torchfile.dtypes import STORAGE_TYPE_OF_DTYPE
from tasks.torchfile.objects import StorageRef, TensorRef, contiguous_stride

RANDOM_STATE_KEY = "rng_tracker_states"
_SUFFIX = re.compile(r"-model_part-\d+(-shard\d+)?")


@dataclass(slots=True)
class TargetObjects:
    """The object tree of one target file, and what its storages are; those not named here are the source's."""

    root: Any = None
    numbers: dict[StorageRef, int] = field(default_factory=dict)
    "of the storages that the plan fills: their numbers in it"
    copies: dict[StorageRef, StorageRef] = field(default_factory=dict)
    "of the storages that repeat one of the source's: that one"
    literals: dict[StorageRef, bytes] = field(default_factory=dict)
    "of the storages that are made here: their bytes"

    def tensor(self, number: int, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        """Make a tensor over a storage of the plan."""
        storage = StorageRef(STORAGE_TYPE_OF_DTYPE[dtype], str(number), "cpu", math.prod(shape))
        self.numbers[storage] = number
        return TensorRef(storage, 0, shape, contiguous_stride(shape))

    def single_copy(self, tensor: TensorRef) -> TensorRef:
        """Make a tensor whose bytes are those of a small one of the source, but its own."""
        storage = replace(tensor.storage, key=f"copy of {tensor.storage.key}")
        self.copies[storage] = tensor.storage
        return replace(tensor, storage=storage)

    def number_tensor(self, dtype: str, number: float) -> TensorRef:
        """Make a tensor of one number."""
        storage = StorageRef(STORAGE_TYPE_OF_DTYPE[dtype], "number", "cpu", 1)
        self.literals[storage] = pack_number(dtype, number)
        return TensorRef(storage, 0, (), ())


def provider_rank(source: Mesh, target: Mesh, mp: int, dp: int) -> tuple[int, int]:
    """Return the source rank from which a target file gets everything that is not a tensor of the model.

    The same rank where the mesh is unchanged, else the nearest part. State that only global rank 0 has (the position
    in the training data) goes to rank 0: others take theirs from another rank wherever there is one of that part.

    >>> provider_rank(Mesh(2, 4), Mesh(2, 2), 1, 1), provider_rank(Mesh(2, 4), Mesh(4, 1), 1, 0)
    ((1, 1), (0, 1))
    """
    part = mp if source.mp == target.mp else mp * source.mp // target.mp
    if source.dp == target.dp and (part, dp) != (0, 0):
        return part, dp
    rank = (part, 0 if dp == 0 else min(dp, source.dp - 1))
    if rank == (0, 0) and (mp, dp) != (0, 0) and source.dp > 1:
        return part, 1
    return rank


def dropped_state(source: Mesh, target: Mesh) -> tuple[str, ...]:
    """Name the state that cannot be given to the target's ranks, whatever is asked for."""
    return () if source.mp == target.mp else (f"extra_state.{RANDOM_STATE_KEY}",)


def make_objects(
    root: Any,
    state_root: Any,
    source: Source,
    target: Target,
    *,
    mp: int,
    dp: int,
    scales: Mapping[int, float],
    number_of: NumberOf,
) -> TargetObjects:
    """Make the objects of the target file (mp, dp) from those of its provider, which are changed in place.

    `state_root` are the objects of the file that has the optimizer's state, mostly the same. `scales` are the factors
    of this file's moments, by number of the storage in the plan, where they have any. `number_of` reads a tensor of
    one number.
    """
    made = TargetObjects()
    names = model_order(target)

    def tensor_of(number: int) -> TensorRef:
        slot = target.slots[number]
        if slot.unit is None:
            return made.tensor(number, slot_dtype(target, slot), entry_shape(source, target, slot.entries[0]))
        total = sum(entry_elements(source, target, entry) for entry in slot.entries)
        return made.tensor(number, slot_dtype(target, slot), (fsdp_chunk(total, target.options.mesh.dp),))

    state = StateMaker(source, target, tensor_of, made.single_copy, made.number_tensor, number_of, scales)
    model = state.average("", names)
    is_bare = not (isinstance(root, dict) and isinstance(root.get("model"), dict))
    if is_bare and not target.options.flat:
        made.root = model
        return made
    made.root = {} if is_bare else root
    made.root["model"] = model
    made.root.pop("shard_metadata", None)
    if target.options.flat:
        made.root["shard_metadata"] = _shard_metadata(source, target, dp)
    _update_state(made.root, state_root, state, names, source, target, mp, dp)
    for key in ("cfg", "args"):
        _update_config(made.root.get(key), source.mesh, target, mp, dp)
    return made


def model_order(target: Target) -> list[str]:
    """List the keys of the model dict as FSDP has them: the root's flat parameters, named tensors, the other units."""
    roots = [unit.key for unit in target.units if not unit.path]
    return [*roots, *(entry.name for entry in target.named), *(unit.key for unit in target.units if unit.path)]


def _shard_metadata(source: Source, target: Target, dp: int) -> dict[str, Any]:
    """Describe the flat parameters of one shard, as fairscale's `local_metadata_dict` does."""
    num_dp = target.options.mesh.dp
    described: dict[str, dict[str, Any]] = {}
    for parameter in flat_parameters(source, target):
        numels = [math.prod(shape) for shape in parameter.shapes]
        total = sum(numels)
        chunk = fsdp_chunk(total, num_dp)
        unit = described.setdefault(
            parameter.path,
            {
                "fsdp_path": parameter.path,
                "params": {},
                "no_broadcast_optim_state": False,
                "shared_param_info": [
                    (name.removeprefix(_dotted(parameter.path)), repeated.removeprefix(_dotted(parameter.path)))
                    for name, repeated in target.ties
                    if name in parameter.full_names()
                ],
            },
        )
        unit["params"][parameter.key.rpartition(".")[2]] = {
            "names": list(parameter.names),
            "shapes": [tuple(iter(shape)) for shape in parameter.shapes],
            "numels": numels,
            "padding": chunk - max(0, min(chunk, total - dp * chunk)),
        }
    return {"param_metadata": list(described.values()), "buffer_names": [entry.name for entry in target.named]}


def _dotted(path: str) -> str:
    return f"{path}." if path else ""


def _update_state(
    root: dict[str, Any],
    state_root: Any,
    state: StateMaker,
    names: Sequence[str],
    source: Source,
    target: Target,
    mp: int,
    dp: int,
) -> None:
    """Put the training state in place of the source's, or take it out; then what belongs to other ranks."""
    keep = target.options.keep_state
    for key in OPTIMIZER_KEYS:
        if not keep and key in root:
            del root[key]
    if keep and source.optimizer is not None and holds_optimizer(state_root):
        root[OPTIMIZER_KEY] = state.optimizer(state_root[OPTIMIZER_KEY])
    extra = root.get("extra_state")
    if not isinstance(extra, dict):
        return
    for key in EMA_KEYS:
        if key in target.states:
            extra[key] = state.average(key, names)
        elif not keep:
            extra.pop(key, None)
    if source.mesh.mp != target.options.mesh.mp:
        extra.pop(RANDOM_STATE_KEY, None)
    iterator = extra.get("train_iterator")
    if (mp, dp) != (0, 0) and isinstance(iterator, dict):
        # Only global rank 0 has it (metaseq `StreamingEpochBatchIterator`); here rank 0's file may be the only
        # provider.
        iterator.pop("tokenization_cache", None)


def _update_config(cfg: object, source: Mesh, target: Target, mp: int, dp: int) -> None:
    """Make every place that states the mesh, the rank or the kind of state say what is true of the target file."""
    mesh = target.options.mesh
    provider = provider_rank(source, mesh, mp, dp)
    # Global ranks count model-parallel parts first (metaseq `initialize_model_parallel`).
    old_rank, new_rank = provider[1] * source.mp + provider[0], dp * mesh.mp + mp
    for name, value, put in config_tree.leaves(cfg):
        if name == "model_parallel_size" and isinstance(value, int):
            put(mesh.mp)
        elif name == "distributed_world_size" and isinstance(value, int):
            put(mesh.mp * mesh.dp)
        elif name == "use_sharded_state" and isinstance(value, bool):
            put(target.options.flat)
        elif name == "distributed_rank" and value == old_rank:
            put(new_rank)
        elif name == "checkpoint_suffix" and isinstance(value, str) and (match := _SUFFIX.fullmatch(value)):
            put(f"-model_part-{mp}" + (f"-shard{dp}" if match[1] else ""))
