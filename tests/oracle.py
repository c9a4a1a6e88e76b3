"""A naive model of metaseq checkpoints, for tests: whole tensors in memory, torch only, nothing of the product.

It builds models, cuts them into model-parallel parts, flattens those as fairscale's FSDP does, writes the files with
torch.save, and merges any set of files back into whole tensors by the rules that metaseq itself follows.

    model = build(Spec(layers=2, heads=4))
    write(folder, model, Layout(mp=2, dp=3, flat=True))
    same(read(folder.glob("*.pt")), model.tensors)

Every random tensor is random *bits*: NaNs with payloads, infinities, negative zeros and subnormal numbers are in it.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Objects = dict[str, Any]
Edit = Callable[[Objects, int, int], Any]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Spec:
    """One model's dimensions, and which optional tensors it has."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 2
    inner: int = 8
    vocabulary: int = 8
    positions: int = 6
    "of the embedding's rows, two of which cfg does not count; 0: sinusoidal positions"
    fused: bool = True
    gate: bool = False
    inner_norm: bool = False
    bias: bool = True
    affine: bool = True
    "norms have weights"
    final_norm: bool = True
    projected: int = 0
    "width of the token embedding where it is not the model's (350M)"
    output: str = "none"
    "output_projection: none, tied, untied"
    block: int = 1
    "layers in one FSDP unit"
    dtype: torch.dtype = torch.float16
    norm_dtype: torch.dtype | None = None
    "of the norms, where they differ: such a model cannot be flattened"
    tame: bool = False
    "small normal numbers instead of random bits, so that casts say something"
    seed: int = 0

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Layout:
    """How a checkpoint lies in files."""

    mp: int = 1
    dp: int = 1
    flat: bool = False
    root_only: bool = False
    "one FSDP unit for the whole model"


@dataclass(frozen=True)
class Model:
    """Whole tensors in module order, by name."""

    spec: Spec
    tensors: dict[str, Tensor]


# -- the model


def layer_prefix(spec: Spec, layer: int) -> str:
    """
    >>> layer_prefix(Spec(), 3), layer_prefix(Spec(block=2), 3)
    ('decoder.layers.3.', 'decoder.layers.1.layers.1.')
    """
    if spec.block == 1:
        return f"decoder.layers.{layer}."
    return f"decoder.layers.{layer // spec.block}.layers.{layer % spec.block}."


def layer_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """List one layer's parameters in module order."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if spec.bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str, size: int) -> None:
        if spec.affine:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (size,), (size,)

    if spec.fused:
        linear("self_attn.qkv_proj", 3 * spec.embed, spec.embed)
    else:
        for name in "kvq":
            linear(f"self_attn.{name}_proj", spec.embed, spec.embed)
    linear("self_attn.out_proj", spec.embed, spec.embed)
    norm("self_attn_layer_norm", spec.embed)
    if spec.inner_norm:
        norm("ffn_layernorm", spec.inner)
    linear("fc1", spec.inner, spec.embed)
    if spec.gate:
        linear("activation_fn.gate", spec.inner, spec.embed)
    linear("fc2", spec.embed, spec.inner)
    norm("final_layer_norm", spec.embed)
    return shapes


def shapes_of(spec: Spec) -> dict[str, tuple[int, ...]]:
    """List all tensors in the order of the model's modules, buffers first."""
    width = spec.projected or spec.embed
    shapes: dict[str, tuple[int, ...]] = {"decoder.version": (1,)}
    shapes["decoder.embed_tokens.weight"] = (spec.vocabulary, width)
    if spec.projected:
        shapes["decoder.project_in_dim.weight"] = (spec.embed, width)
    if spec.positions:
        shapes["decoder.embed_positions.weight"] = (spec.positions, spec.embed)
    else:
        shapes["decoder.embed_positions._float_tensor"] = (1,)
    for layer in range(spec.layers):
        shapes |= {layer_prefix(spec, layer) + name: shape for name, shape in layer_shapes(spec).items()}
    if spec.final_norm and spec.affine:
        shapes["decoder.layer_norm.weight"] = shapes["decoder.layer_norm.bias"] = (spec.embed,)
    if spec.projected:
        shapes["decoder.project_out_dim.weight"] = (width, spec.embed)
    if spec.output != "none":
        shapes["decoder.output_projection.weight"] = (spec.vocabulary, width)
    return shapes


def is_buffer(name: str) -> bool:
    return name in ("decoder.version", "decoder.embed_positions._float_tensor")


def build(spec: Spec) -> Model:
    """Make a model of random bits."""
    generator = torch.Generator().manual_seed(spec.seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes_of(spec).items():
        dtype = spec.norm_dtype if spec.norm_dtype and "norm" in name else spec.dtype
        if name == "decoder.version":
            tensors[name] = torch.tensor([3.0], dtype=dtype)
        elif is_buffer(name):
            tensors[name] = torch.zeros(1, dtype=dtype)
        elif name == "decoder.output_projection.weight" and spec.output == "tied":
            tensors[name] = tensors["decoder.embed_tokens.weight"]
        elif spec.tame:
            tensors[name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            limit = 1 << (8 * dtype.itemsize - 1)
            bits = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int64)
            tensors[name] = bits.to(BITS[dtype]).view(dtype)
    return Model(spec, tensors)


# -- model-parallel parts


def axis_of(name: str) -> int | None:
    """Return the axis along which parts of a tensor stand one after another; None where parts hold the same."""
    if re.search(r"(embed_tokens|output_projection)\.weight$", name):
        return 0
    if re.search(r"\.(qkv_proj|k_proj|v_proj|q_proj|fc1|gate|ffn_layernorm)\.(weight|bias)$", name):
        return 0
    if re.search(r"\.(out_proj|fc2)\.weight$", name):
        return 1
    return None


def cut(name: str, tensor: Tensor, part: int, num_parts: int) -> Tensor:
    """Return what one part holds of a whole tensor; of a fused projection, its share of each of K, V and Q."""
    axis = axis_of(name)
    if axis is None:
        return tensor.clone()
    if ".qkv_proj." in name:
        return torch.cat([third.chunk(num_parts)[part] for third in tensor.chunk(3)])
    size = tensor.shape[axis] // num_parts
    assert size * num_parts == tensor.shape[axis], f"{name}: {tuple(tensor.shape)} over {num_parts}"
    return tensor.narrow(axis, part * size, size).clone()


def join(name: str, parts: list[Tensor]) -> Tensor:
    """Put a tensor's parts together, as metaseq's merge does."""
    axis = axis_of(name)
    if axis is None:
        for part in parts[1:]:
            assert_same_bits(part, parts[0], f"replicas of {name}")
        return parts[0]
    if ".qkv_proj." in name:
        thirds = [part.chunk(3) for part in parts]
        return torch.cat([torch.cat([third[number] for third in thirds]) for number in range(3)])
    return torch.cat(parts, dim=axis)


def part_of(model: Model, part: int, num_parts: int) -> dict[str, Tensor]:
    held = {name: cut(name, tensor, part, num_parts) for name, tensor in model.tensors.items()}
    if model.spec.output == "tied":
        held["decoder.output_projection.weight"] = held["decoder.embed_tokens.weight"]
    return held


# -- FSDP


def units_of(names: Iterable[str], *, root_only: bool) -> dict[str, list[str]]:
    """Group parameters into FSDP units by path, root first, each in module order."""
    units: dict[str, list[str]] = {"": []}
    for name in names:
        layer = re.match(r"decoder\.layers\.\d+", name)
        units.setdefault(layer[0] if layer and not root_only else "", []).append(name)
    return units


def shards_of(flat: Tensor, num_shards: int) -> list[tuple[Tensor, int]]:
    """Cut a flat parameter as FSDP does: torch.chunk, then zeros at the end of each; return (shard, padding).

    >>> [(shard.tolist(), padding) for shard, padding in shards_of(torch.arange(1, 6), 4)]
    [([1, 2], 0), ([3, 4], 0), ([5, 0], 1), ([0, 0], 2)]
    """
    chunks = list(torch.chunk(flat, num_shards))
    longest = chunks[0].numel()
    chunks += [flat[:0]] * (num_shards - len(chunks))
    return [(torch.cat([chunk, flat.new_zeros(longest - len(chunk))]), longest - len(chunk)) for chunk in chunks]


def flat_objects(spec: Spec, held: Mapping[str, Tensor], layout: Layout, dp: int) -> tuple[Objects, Objects]:
    """Return the model dict and the shard_metadata of one data-parallel rank."""
    tied = spec.output == "tied"
    named = {name: tensor for name, tensor in held.items() if is_buffer(name)}
    glued = [n for n in held if not is_buffer(n) and not (tied and n == "decoder.output_projection.weight")]
    units: dict[str, Tensor] = {}
    described = []
    for path, names in units_of(glued, root_only=layout.root_only).items():
        flat = torch.cat([held[name].reshape(-1) for name in names])
        shard, padding = shards_of(flat, layout.dp)[dp]
        units[f"{path}.flat_param_0" if path else "flat_param_0"] = shard
        facts = {
            "names": [name.removeprefix(f"{path}.") if path else name for name in names],
            "shapes": [tuple(held[name].shape) for name in names],
            "numels": [held[name].numel() for name in names],
            "padding": padding,
        }
        shared = [("decoder.embed_tokens.weight", "decoder.output_projection.weight")] if tied and not path else []
        described.append(
            {
                "fsdp_path": path,
                "params": {"flat_param_0": facts},
                "no_broadcast_optim_state": False,
                "shared_param_info": shared,
            }
        )
    root = {"flat_param_0": units.pop("flat_param_0")}
    return {**root, **named, **units}, {"param_metadata": described, "buffer_names": list(named)}


# -- files


def config(spec: Spec, layout: Layout) -> Objects:
    """Make `cfg` as the trainer saves it."""
    model = Namespace(
        _name="transformer_lm_megatron",
        arch="transformer_lm_megatron",
        decoder_layers=spec.layers,
        decoder_embed_dim=spec.embed,
        decoder_ffn_embed_dim=spec.inner,
        decoder_attention_heads=spec.heads,
        max_target_positions=spec.positions - 2 if spec.positions else 1024,
        decoder_learned_pos=bool(spec.positions),
        activation_fn="swiglu" if spec.gate else "relu",
        disable_bias=not spec.bias,
        disable_affine_ln=not spec.affine,
        fsdp_checkpoint_wrap_layer_frequency=spec.block,
        model_parallel_size=layout.mp,
        min_params_to_wrap=100_000_000,
        checkpoint_activations=not layout.root_only,
    )
    if spec.output != "none":
        model.share_decoder_input_output_embed = spec.output == "tied"
    return {
        "common": {"fp16": True, "seed": 1, "model_parallel_size": layout.mp},
        "checkpoint": {"save_dir": "/checkpoints", "model_parallel_size": layout.mp, "use_sharded_state": layout.flat},
        "distributed_training": {
            "distributed_world_size": layout.mp * layout.dp,
            "ddp_backend": "fully_sharded",
            "use_sharded_state": layout.flat,
        },
        "task": Namespace(_name="streaming_language_modeling", data="/data"),
        "model": model,
    }


def random_state(part: int) -> Tensor:
    return torch.arange(16, dtype=torch.uint8) + part


def objects_of(model: Model, layout: Layout, mp: int, dp: int, *, random_parts: bool = False) -> Objects:
    """Make the objects of one file, in the trainer's order."""
    held = part_of(model, mp, layout.mp)
    metadata = None
    if layout.flat:
        held, metadata = flat_objects(model.spec, held, layout, dp)
    extra: Objects = {
        "metrics": OrderedDict([("default", [(0, "loss", {"val": 1.5})])]),
        "previous_training_time": 12.5,
        "train_iterator": {"epoch": 1, "version": 2, "shuffle": True},
    }
    if random_parts:
        extra["rng_tracker_states"] = {"model-parallel-rng": random_state(mp)}
    objects: Objects = {
        "cfg": config(model.spec, layout),
        "model": held,
        "criterion": None,
        "optimizer_history": [{"optimizer_name": "FusedAdam", "num_updates": 10, "lr_scheduler_state": {"best": None}}],
        "task_state": {},
        "extra_state": extra,
    }
    if metadata is not None:
        objects["shard_metadata"] = metadata
    return objects


def name_of(prefix: str, layout: Layout, mp: int, dp: int) -> str:
    """Name a file as metaseq's trainer (flat) and its inference (unflat) do."""
    if layout.flat:
        return f"{prefix}-model_part-{mp}-shard{dp}.pt"
    return f"{prefix}-model_part-{mp}.pt" if layout.mp > 1 else f"{prefix}.pt"


def ranks(layout: Layout) -> Iterator[tuple[int, int]]:
    for mp in range(layout.mp):
        for dp in range(layout.dp):
            yield mp, dp


def write(
    folder: Path,
    model: Model,
    layout: Layout,
    *,
    prefix: str = "reshard",
    metadata: bool = True,
    random_parts: bool = False,
    edit: Edit | None = None,
    name: Callable[[int, int], str] | None = None,
) -> list[Path]:
    """Write a checkpoint's files; `edit` may change a file's objects, `name` give it another name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for mp, dp in ranks(layout):
        objects: Any = objects_of(model, layout, mp, dp, random_parts=random_parts)
        if not metadata:
            objects.pop("shard_metadata", None)
        if edit is not None:
            objects = edit(objects, mp, dp)
        path = folder / (name(mp, dp) if name else name_of(prefix, layout, mp, dp))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(objects, path)
        paths.append(path)
    return paths


def settle(path: Path) -> None:
    """Write a file anew from what torch.load makes of it.

    Loading interns the attribute names of a Namespace, so which strings are one object differs from the first save to
    the second, and with it the pickle; from then on it stays the same.
    """
    torch.save(load(path), path)


def wrapped(objects: Objects, *, flat_name: str = "flat_param_0") -> Objects:
    """Put wrapper modules back into the names, as hooks that did not run leave them; rename the flat parameters."""

    def path(plain: str) -> str:
        return re.sub(r"(decoder\.layers\.\d+)", r"\1._fsdp_wrapped_module._fpw_module", plain)

    def key(plain: str) -> str:
        return path(plain).replace("flat_param_0", flat_name)

    metadata = objects["shard_metadata"]
    units = [
        {
            **unit,
            "fsdp_path": path(unit["fsdp_path"]),
            "params": {flat_name: unit["params"]["flat_param_0"]},
        }
        for unit in metadata["param_metadata"]
    ]
    model = {key(name): tensor for name, tensor in objects["model"].items()}
    return {**objects, "model": model, "shard_metadata": {**metadata, "param_metadata": units}}


# -- reading back


def parse_ranks(name: str) -> tuple[int, int]:
    """
    >>> parse_ranks("checkpoint_1_4000.pt-model_part-10-shard2.pt"), parse_ranks("reshard.pt")
    ((10, 2), (0, 0))
    """
    match = re.fullmatch(r".*?(?:-model_part-(\d+))?(?:-shard(\d+))?\.pt", name)
    assert match is not None, name
    return int(match[1] or 0), int(match[2] or 0)


def unflatten(shards: list[Objects]) -> dict[str, Tensor]:
    """Undo FSDP for one part: take the padding off each shard, join, cut by shapes; restore tied parameters."""
    held: dict[str, Tensor] = {}
    flat_keys = set()
    first = shards[0].get("shard_metadata")
    for number, unit in enumerate(first["param_metadata"] if first else ()):
        path = unit["fsdp_path"]
        for flat_name, facts in unit["params"].items():
            key = f"{path}.{flat_name}" if path else flat_name
            flat_keys.add(key)
            pieces = []
            for shard in shards:
                own = shard["shard_metadata"]["param_metadata"][number]["params"][flat_name]
                assert {k: v for k, v in own.items() if k != "padding"} == {
                    k: v for k, v in facts.items() if k != "padding"
                }
                piece, padding = shard["model"][key], own["padding"]
                stored = len(piece) - padding
                assert not piece[stored:].view(torch.uint8).any(), f"padding of {key} is not zero"
                pieces.append(piece[:stored])
            tensors = torch.cat(pieces).split(facts["numels"])
            for name, shape, tensor in zip(facts["names"], facts["shapes"], tensors, strict=True):
                held[f"{path}.{name}" if path else name] = tensor.view(shape)
        for one, other in unit["shared_param_info"]:
            held[f"{path}.{other}" if path else other] = held[f"{path}.{one}" if path else one]
    for name, tensor in shards[0]["model"].items():
        if name in flat_keys:
            continue
        for shard in shards[1:]:
            assert_same_bits(shard["model"][name], tensor, name)
        held[name] = tensor
    for shard in shards:
        assert list(shard["model"]) == list(shards[0]["model"])
    return held


def load(path: Path) -> Objects:
    return torch.load(path, weights_only=False)


def load_shard(path: Path) -> Objects:
    """Load a file; a bare state dict becomes the model of one."""
    objects = load(path)
    return objects if "model" in objects else {"model": objects}


def read(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Merge the files of one checkpoint into whole tensors."""
    grid = {parse_ranks(path.name): load_shard(path) for path in paths}
    num_mp, num_dp = (max(rank[axis] for rank in grid) + 1 for axis in (0, 1))
    assert len(grid) == num_mp * num_dp
    parts = [unflatten([grid[mp, dp] for dp in range(num_dp)]) for mp in range(num_mp)]
    for part in parts[1:]:
        assert part.keys() == parts[0].keys()
    return {name: join(name, [part[name] for part in parts]) for name in parts[0]}


def split_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give K, V and Q names of their own."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv_proj." in name:
            thirds = zip("kvq", tensor.chunk(3), strict=True)
            apart |= {name.replace(".qkv_proj.", f".{letter}_proj."): third for letter, third in thirds}
        else:
            apart[name] = tensor
    return apart


def with_projections(model: Model, *, fused: bool) -> Model:
    """Return the same model with K, V and Q in one tensor, or in three."""
    spec = replace(model.spec, fused=fused)
    apart = split_projections(model.tensors)
    tensors = {}
    for name in shapes_of(spec):
        if ".qkv_proj." in name:
            tensors[name] = torch.cat([apart[name.replace(".qkv_proj.", f".{letter}_proj.")] for letter in "kvq"])
        else:
            tensors[name] = apart[name]
    return Model(spec, tensors)


# -- comparing


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """NaN payloads and the sign of zero count."""
    facts = (actual.dtype, tuple(actual.shape)), (expected.dtype, tuple(expected.shape))
    assert facts[0] == facts[1], f"{what}: {facts[0]} instead of {facts[1]}"
    assert raw(actual) == raw(expected), f"{what}: bits differ"


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


def assert_same_objects(actual: Any, expected: Any, where: str = "root") -> None:
    """Compare object trees: types, order of keys, values; tensors bit for bit."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, Tensor):
        assert_same_bits(actual, expected, where)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), f"{where}: keys {list(actual)} instead of {list(expected)}"
        for key, item in expected.items():
            assert_same_objects(actual[key], item, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {actual} instead of {expected}"
        for number, item in enumerate(expected):
            assert_same_objects(actual[number], item, f"{where}[{number}]")
    elif isinstance(expected, Namespace):
        assert_same_objects(vars(actual), vars(expected), f"{where}.__dict__")
    else:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"
