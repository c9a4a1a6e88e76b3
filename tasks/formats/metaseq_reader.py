"""Reads the objects of one metaseq file (tensors as references, never bytes) into a shard index.

The layout of the objects follows metaseq `Trainer.state_dict` and fairscale
`FullyShardedDataParallel.local_metadata_dict`.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.checkpoint import FlatParameter, ModelConfig, ShardMetadata, StatePart, StoredTensor
from tasks.errors import ErrorKind, Problem
from tasks.family import clean_name
from tasks.formats import config_tree
from tasks.torchfile.inert import Inert
from tasks.torchfile.objects import StorageRef, TensorRef

# Old fairscale wrote `flat_param`, new `flat_param_0`; fairscale renames on load.
_OLD_FLAT_NAME, _FLAT_NAME = "flat_param", "flat_param_0"
OPTIMIZER_KEYS = ("last_optimizer_state", "optimizer", "optimizer_state")
EMA_KEYS = ("ema", "ema_fp32_params")
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


def flat_key(name: str) -> str:
    """Return a flat parameter's key as new fairscale spells it.

    >>> flat_key("decoder.layers.0.flat_param"), flat_key("flat_param_1")
    ('decoder.layers.0.flat_param_0', 'flat_param_1')
    """
    head, _, last = name.rpartition(".")
    last = _FLAT_NAME if last == _OLD_FLAT_NAME else last
    return f"{head}.{last}" if head else last


# Old normformer runs kept one norm per part, of which only the part's own was trained (metaseq `handle_legacy_ln_`).
_LEGACY_NORM = re.compile(r"(.*ffn_layernorm)\.lns\.(\d+)\.(weight|bias)")


def canonical_name(name: str, mp: int) -> str | None:
    """Return the name of a part's tensor in the model; None for one that the part holds but never trained.

    >>> canonical_name("ffn_layernorm.lns.1.bias", 1), canonical_name("ffn_layernorm.lns.1.bias", 0)
    ('ffn_layernorm.bias', None)
    """
    legacy = _LEGACY_NORM.fullmatch(name)
    if legacy is None:
        return name
    return f"{legacy[1]}.{legacy[3]}" if int(legacy[2]) == mp else None


def is_flat_key(name: str) -> bool:
    """
    >>> is_flat_key("decoder.layers.3.flat_param_0"), is_flat_key("decoder.flat_parameter.weight")
    (True, False)
    """
    last = name.rpartition(".")[2]
    return last == _OLD_FLAT_NAME or (last.startswith("flat_param_") and last[11:].isdigit())


def model_of(root: object, label: str) -> tuple[Mapping[str, Any], bool] | Problem:
    """Return the `model` dict and whether the file is a bare state dict, or what is wrong."""
    if isinstance(root, dict) and isinstance(root.get("model"), dict):
        return root["model"], False
    if isinstance(root, dict) and root and all(isinstance(item, TensorRef) for item in root.values()):
        return root, True
    found = f"its top level is a {type(root).__name__}" + (f" with {_listed(root)}" if isinstance(root, dict) else "")
    return Problem(
        ErrorKind.SOURCE,
        "not-a-checkpoint",
        f"{label} holds no model",
        (f"expected: a dict with 'model', or a dict of tensors; {found}",),
        "pass a checkpoint: a file with 'model' in it, or the files of one with --checkpoint",
    )


def _listed(keys: Mapping[Any, Any]) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")


def stored_tensors(
    model: Mapping[str, Any], locate: Mapping[StorageRef, tuple[int, int, int | None]], label: str
) -> tuple[list[StoredTensor], list[Problem]]:
    """List the tensors of a model dict with the bytes that hold them."""
    tensors: list[StoredTensor] = []
    problems: list[Problem] = []
    for name, item in model.items():
        if not isinstance(name, str) or not isinstance(item, TensorRef):
            problems.append(_unusable(name, label, f"it is a {type(item).__name__}, not a plain tensor"))
            continue
        if item.untyped_dtype:
            problems.append(_unusable(name, label, f"its dtype {item.dtype} has no storage class of its own"))
            continue
        if not item.is_contiguous:
            problems.append(_unusable(name, label, f"its strides {item.stride} do not fit its shape {item.shape}"))
            continue
        offset, size, crc32 = locate[item.storage]
        begin = item.offset * item.item_size_bytes
        is_whole = begin == 0 and item.num_elements * item.item_size_bytes == size
        tensors.append(
            StoredTensor(
                name=flat_key(clean_name(name)) if is_flat_key(name) else clean_name(name),
                dtype=item.dtype,
                shape=item.shape,
                offset_bytes=offset + begin,
                storage=item.storage.key,
                storage_offset=item.offset,
                crc32=crc32 if is_whole else None,
            )
        )
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            problems.append(_unusable(tensor.name, label, "it is there twice once wrapper modules are left out"))
        seen.add(tensor.name)
    return tensors, problems


def _unusable(name: object, label: str, why: str) -> Problem:
    message = f"{label}: tensor {name} cannot be resharded: {why}"
    return Problem(ErrorKind.SOURCE, "unusable-tensor", message, hint="save it as a plain contiguous tensor")


def shard_metadata(root: object, label: str) -> tuple[ShardMetadata | None, tuple[int, ...], list[Problem]]:
    """Read `shard_metadata` by key; return it without the padding, the padding of this shard, and what is wrong."""
    stated = root.get("shard_metadata") if isinstance(root, dict) else None
    if not stated:
        return None, (), []
    try:
        parameters, paddings, shared = [], [], []
        for unit in stated["param_metadata"]:
            path = clean_name(unit["fsdp_path"])
            for name, facts in unit["params"].items():
                shapes = tuple(_shape(shape) for shape in facts["shapes"])
                numels = [int(n) for n in facts["numels"]]
                if [math.prod(shape) for shape in shapes] != numels or len(facts["names"]) != len(shapes):
                    raise ValueError(f"numels {numels} do not fit shapes {shapes} of {path}.{name}")
                key = flat_key(f"{path}.{name}" if path else name)
                names = tuple(clean_name(item) for item in facts["names"])
                parameters.append(FlatParameter(path, key, names, shapes, bool(unit["no_broadcast_optim_state"])))
                paddings.append(int(facts["padding"]))
            # Names of shared parameters are relative to their unit, as `names` are (fairscale states them so).
            at = f"{path}." if path else ""
            shared += [(at + clean_name(a), at + clean_name(b)) for a, b in unit.get("shared_param_info", ())]
        buffers = tuple(clean_name(name) for name in stated["buffer_names"])
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        return (
            None,
            (),
            [
                Problem(
                    ErrorKind.SOURCE,
                    "bad-shard-metadata",
                    f"{label}: shard_metadata is not as fairscale writes it: {reprlib.repr(fault)}",
                    hint="remove the key shard_metadata: the layout is then inferred from cfg",
                )
            ],
        )
    return ShardMetadata(tuple(parameters), tuple(shared), buffers), tuple(paddings), []


def _shape(shape: object) -> tuple[int, ...]:
    """Accept plain tuples and lists (metaseq) and torch.Size (other users of fairscale)."""
    if isinstance(shape, Inert):
        shape = shape.args[0]
    if not isinstance(shape, tuple | list):
        raise TypeError(f"{reprlib.repr(shape)} is not a shape")
    return tuple(int(n) for n in shape)


def model_config(root: object) -> ModelConfig | None:
    """Read what `cfg` or `args` says of the model."""
    if not isinstance(root, dict):
        return None
    for model in _model_configs(root):
        return _model_config(model, root.get("cfg"))
    return None


def _model_configs(root: Mapping[str, Any]) -> Iterator[object]:
    below = config_tree.children(root.get("cfg"))
    for node in ((below or {}).get("model"), root.get("args")):
        if config_tree.children(node) is not None:
            yield node


def _model_config(model: object, cfg: object) -> ModelConfig:
    def integer(*names: str) -> int | None:
        found = (config_tree.get(model, name) for name in names)
        return next((item for item in found if isinstance(item, int) and not isinstance(item, bool)), None)

    def flag(name: str) -> bool | None:
        item = config_tree.get(model, name)
        return item if isinstance(item, bool) else None

    def text(*names: str) -> str:
        found = (config_tree.get(model, name) for name in names)
        return next((item for item in found if isinstance(item, str) and item), "")

    dictionary = config_tree.get(cfg, "task", "dict_size")
    return ModelConfig(
        mp=integer("model_parallel_size"),
        world_size=integer("distributed_world_size"),
        layers=integer("decoder_layers"),
        embed_dim=integer("decoder_embed_dim"),
        ffn_dim=integer("decoder_ffn_embed_dim"),
        heads=integer("decoder_attention_heads"),
        positions=integer("max_target_positions", "tokens_per_sample"),
        vocabulary=dictionary if isinstance(dictionary, int) else None,
        arch=text("arch", "_name"),
        activation=text("activation_fn") or "relu",
        ties_embeddings=flag("share_decoder_input_output_embed"),
        learned_positions=flag("decoder_learned_pos") is not False,
        no_bias=bool(flag("disable_bias")),
        no_final_norm=bool(flag("no_decoder_final_norm")),
        inner_norms=bool(flag("scale_fc")),
        input_dim=integer("decoder_input_dim"),
        output_dim=integer("decoder_output_dim"),
        no_affine_norms=bool(flag("disable_affine_ln")),
        block_layers=integer("fsdp_checkpoint_wrap_layer_frequency") or 1,
        min_params_to_wrap=integer("min_params_to_wrap"),
        checkpoints_activations=bool(flag("checkpoint_activations")),
    )


def training_state(root: object) -> tuple[StatePart, ...]:
    """List the optimizer state and moving averages of a file with their sizes."""
    if not isinstance(root, dict):
        return ()
    extra = root.get("extra_state")
    found = [(key, root.get(key)) for key in OPTIMIZER_KEYS]
    if isinstance(extra, dict):
        found += [(f"extra_state.{key}", extra.get(key)) for key in EMA_KEYS]
    # An unsharded run saves -1 as the optimizer of every rank but the first: no state, yet the key is there.
    # Empty ones and None are nobody's state either.
    return tuple(StatePart(name, tensor_bytes(item)) for name, item in found if item and item != -1)


def other_tensors(root: object, *, label: str = "") -> tuple[StatePart, ...]:
    """List what else holds tensors: state that is passed through unchanged."""
    if not isinstance(root, dict):
        return ()
    parts = []
    for key, item in root.items():
        if key in ("model", *OPTIMIZER_KEYS):
            continue
        inner = item.items() if key == "extra_state" and isinstance(item, dict) else [(None, item)]
        for name, below in inner:
            if name in EMA_KEYS:
                continue
            size = tensor_bytes(below)
            if size:
                parts.append(StatePart(f"{label}{key}.{name}" if name else f"{label}{key}", size))
    return tuple(parts)


def tensor_bytes(node: object) -> int:
    """Add up the storages below a node, each once."""
    return sum(storage.size_bytes for storage in storages(node))


def storages(node: object) -> list[StorageRef]:
    """List the storages below a node, each once, in no particular order."""
    found: dict[int, StorageRef] = {}
    seen: set[int] = set()
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, TensorRef):
            item = item.storage
        if isinstance(item, StorageRef):
            found[id(item)] = item
            continue
        if not isinstance(item, dict | list | tuple | set | frozenset | Inert) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            stack += _without_leaves(item.keys())
            stack += _without_leaves(item.values())
        elif isinstance(item, Inert):
            stack += [item.function, item.args, item.keywords, item.state, item.list_items, item.dict_items]
        else:
            stack += _without_leaves(item)
    return list(found.values())


def _without_leaves(items: Iterable[object]) -> list[object]:
    """Leave out what most nodes are: a file's metadata holds ten thousand names, numbers and shapes."""
    return [item for item in items if type(item) not in _LEAVES and not _is_shape(item)]


def _is_shape(item: object) -> bool:
    return isinstance(item, tuple) and _LEAVES.issuperset(map(type, item))
