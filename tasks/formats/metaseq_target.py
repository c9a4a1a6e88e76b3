"""Makes the objects of a target file: the source's own, with model, metadata and configuration made to fit.

Nothing is dropped but by name. What the source held and no rule here speaks of goes into the target unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tasks.formats import config_tree
from tasks.formats.metaseq_reader import EMA_KEYS, OPTIMIZER_KEYS, storages
from tasks.layout import Mesh, fsdp_chunk
from tasks.source import Source
from tasks.target import Target, entry_elements, entry_shape, flat_parameters
from tasks.torchfile.dtypes import STORAGE_TYPE_OF_DTYPE
from tasks.torchfile.objects import StorageRef, TensorRef, contiguous_stride

RANDOM_STATE_KEY = "rng_tracker_states"
_SUFFIX = re.compile(r"-model_part-\d+(-shard\d+)?")


@dataclass(slots=True)
class TargetObjects:
    """The object tree of one target file."""

    root: Any
    storage_numbers: dict[int, int] = field(default_factory=dict)
    "id of a storage that is written here -> its number in the plan"


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


def make_objects(root: Any, source: Source, target: Target, *, mp: int, dp: int) -> TargetObjects:
    """Make the objects of the target file (mp, dp) from those of its provider, which are changed in place."""
    made = TargetObjects(root=None)
    model = _model(source, target, made, mp=mp, dp=dp)
    is_bare = not (isinstance(root, dict) and isinstance(root.get("model"), dict))
    if is_bare and not target.options.flat:
        made.root = model
        return made
    made.root = {} if is_bare else root
    made.root["model"] = model
    made.root.pop("shard_metadata", None)
    if target.options.flat:
        made.root["shard_metadata"] = _shard_metadata(source, target, dp)
    _drop_state(made.root, source.mesh, target.options.mesh)
    for key in ("cfg", "args"):
        _update_config(made.root.get(key), source.mesh, target, mp, dp)
    return made


def _model(source: Source, target: Target, made: TargetObjects, *, mp: int, dp: int) -> dict[str, TensorRef]:
    """Make the model dict: the root's flat parameters, named tensors, then the other units, as FSDP orders them."""
    num_units, num_dp = len(target.units), target.options.mesh.dp
    units: dict[str, TensorRef] = {}
    for number, unit in enumerate(target.units):
        total = sum(entry_elements(source, target, entry) for entry in unit.entries)
        dtype = target.dtypes[unit.entries[0].members[0]]
        units[unit.key] = _tensor(made, number, dtype, (fsdp_chunk(total, num_dp),))
    named = {
        entry.name: _tensor(
            made, num_units + number, target.dtypes[entry.members[0]], entry_shape(source, target, entry)
        )
        for number, entry in enumerate(target.named)
    }
    if not target.options.flat:
        for name, repeated in target.ties:
            first = named[name]
            # Two tensors over one storage, as torch saves tied parameters.
            named[repeated] = TensorRef(first.storage, 0, fresh(first.shape), contiguous_stride(first.shape))
        return named
    roots = {unit.key for unit in target.units if not unit.path}
    return {key: units[key] for key in units if key in roots} | named | units


def _tensor(made: TargetObjects, number: int, dtype: str, shape: tuple[int, ...]) -> TensorRef:
    num_elements = 1
    for size in shape:
        num_elements *= size
    storage = StorageRef(STORAGE_TYPE_OF_DTYPE[dtype], str(number), "cpu", num_elements)
    made.storage_numbers[id(storage)] = number
    return TensorRef(storage, 0, shape, contiguous_stride(shape))


def _shard_metadata(source: Source, target: Target, dp: int) -> dict[str, Any]:
    """Describe the flat parameters of one shard, as fairscale's `local_metadata_dict` does."""
    num_dp = target.options.mesh.dp
    described: dict[str, dict[str, Any]] = {}
    for parameter in flat_parameters(source, target):
        numels = [_size(shape) for shape in parameter.shapes]
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
            "shapes": [fresh(shape) for shape in parameter.shapes],
            "numels": numels,
            "padding": chunk - max(0, min(chunk, total - dp * chunk)),
        }
    return {"param_metadata": list(described.values()), "buffer_names": [entry.name for entry in target.named]}


def fresh(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Copy a tuple: the pickler writes one object that stands in two places only once, and torch has two."""
    return tuple(iter(shape))


def _dotted(path: str) -> str:
    return f"{path}." if path else ""


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _drop_state(root: dict[str, Any], source: Mesh, target: Mesh) -> None:
    for key in OPTIMIZER_KEYS:
        root.pop(key, None)
    extra = root.get("extra_state")
    if isinstance(extra, dict):
        for key in (*EMA_KEYS, *(() if source.mp == target.mp else (RANDOM_STATE_KEY,))):
            extra.pop(key, None)


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


def passed_through(root: Any, made: TargetObjects) -> list[StorageRef]:
    """List the storages that are copied whole from the provider's file."""
    return [storage for storage in storages(root) if id(storage) not in made.storage_numbers]
