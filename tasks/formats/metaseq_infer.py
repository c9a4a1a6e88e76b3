"""Pure. Infers what a flat parameter without `shard_metadata` holds, from `cfg` and the lengths that are there.

Files of 2022 (the released OPT models among them) are flat and say nothing of their layout. `cfg` names the
dimensions, the module order is known (tasks/families/opt.py), and every length must come out to the last element:
what does not fit is an error, and so is what fits in more than one way. There is no table of model sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tasks.checkpoint import FlatParameter, ModelConfig
from tasks.errors import ErrorKind, Problem
from tasks.family import some
from tasks.layout import fsdp_chunk

Entry = tuple[str, tuple[int, ...]]
# Learned positions have padding_idx + 1 rows more than positions (fairseq LearnedPositionalEmbedding; padding_idx is
# 1).
_EXTRA_POSITIONS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of one model-parallel part, and which optional tensors it has."""

    embed: int
    attention: int
    "rows of each of k, v and q on one part"
    inner: int
    "feed-forward features on one part"
    positions: int
    "rows of the position embedding; 0 where it is not learned"
    fused: bool
    bias: bool
    last_bias: bool
    "of fc2; some builds ignore `disable_bias` there"
    norms: bool
    gate: bool
    inner_norm: bool
    final_norm: bool
    input: int
    "features of the token embedding; projected where they are not `embed`"
    output: int
    untied: bool
    "the output projection has a matrix of its own"


def layer_entries(shape: Shape) -> list[Entry]:
    """List the parameters of one layer in module order, with their shapes on one part."""
    d, a, f = shape.embed, shape.attention, shape.inner
    norm = shape.norms

    def linear(name: str, rows: int, columns: int, bias: bool) -> list[Entry]:
        weight: list[Entry] = [(f"{name}.weight", (rows, columns))]
        return [*weight, (f"{name}.bias", (rows,))] if bias else weight

    def layer_norm(name: str, size: int, present: bool) -> list[Entry]:
        return [(f"{name}.weight", (size,)), (f"{name}.bias", (size,))] if present else []

    inputs = ("qkv",) if shape.fused else ("k", "v", "q")
    rows = 3 * a if shape.fused else a
    attention = [entry for name in inputs for entry in linear(f"self_attn.{name}_proj", rows, d, shape.bias)]
    return [
        *attention,
        *linear("self_attn.out_proj", d, a, shape.bias),
        *layer_norm("self_attn_layer_norm", d, norm),
        *layer_norm("ffn_layernorm", f, shape.inner_norm),
        *linear("fc1", f, d, shape.bias),
        *(linear("activation_fn.gate", f, d, shape.bias) if shape.gate else []),
        *linear("fc2", d, f, shape.last_bias),
        *layer_norm("final_layer_norm", d, norm),
    ]


def infer(
    lengths: Mapping[str, int], *, num_mp: int, num_dp: int, config: ModelConfig | None, fused: bool | None
) -> tuple[tuple[FlatParameter, ...], list[Problem]]:
    """Return the flat parameters of one part, in the order of FSDP units: root first, then the layers.

    `lengths` are those of every shard, padding included, by key. `fused` says whether k, v and q are one tensor;
    None: as the model's kind tells. The two have equal lengths, so nothing in the file could tell.
    """
    if config is None:
        return (), [_cannot("there is no cfg either", "pass files that have cfg or shard_metadata")]
    missing = [name for name in ("layers", "embed_dim", "ffn_dim") if getattr(config, name) is None]
    if missing:
        return (), [_cannot(f"cfg does not say {', '.join(missing)}", "pass files whose cfg is whole")]
    if fused is None:
        # metaseq's model-parallel attention has had one projection from its first release; the others changed in 2023.
        fused = True if num_mp > 1 or "megatron" in config.arch else None
    if fused is None:
        hint = "pass --source-qkv fused or --source-qkv split"
        return (), [_cannot(f"k, v and q may be fused or split in a model of kind {config.arch!r}", hint)]
    unit_layers, problems = _units(lengths, config)
    if problems:
        return (), problems
    stated = _stated_shape(config, num_mp, fused)
    likely = [stated]
    if stated.input != stated.embed:
        # The one released model with projected embeddings (350M) has no final norm, and its cfg does not say so.
        likely.append(replace(stated, final_norm=not stated.final_norm))

    def fitting(shapes: Iterable[Shape]) -> list[tuple[FlatParameter, ...]]:
        return [fit for shape in shapes for fit in _fit(lengths, unit_layers, shape, num_mp, num_dp, config)]

    # What cfg describes to the letter comes first; others only stand in where that does not fit at all.
    fits = fitting(likely) or fitting(_other_shapes(stated))
    if len(fits) == 1:
        return fits[0], []
    context = (
        *(
            f"{key}: {length} elements in each of {num_dp} shards"
            for key, length in itertools.islice(lengths.items(), 4)
        ),
        f"cfg: {config}",
    )
    why = "several arrangements have" if fits else "no arrangement of the tensors that cfg describes has"
    return (), [
        replace(_cannot(f"{why} these lengths", "check cfg, or pass files with shard_metadata"), context=context)
    ]


def _cannot(why: str, hint: str) -> Problem:
    message = f"flat parameters without shard_metadata: {why}"
    return Problem(ErrorKind.SOURCE, "cannot-infer-layout", message, hint=hint)


def _units(lengths: Mapping[str, int], config: ModelConfig) -> tuple[dict[str, list[str]], list[Problem]]:
    """Return, for each unit's path, the prefixes (relative to it) of the layers that it holds."""
    layers, block = config.layers or 0, config.block_layers
    blocks = -(-layers // block)
    expected = {f"decoder.layers.{i}.flat_param_0" for i in range(blocks)}
    found = {key for key in lengths if key != "flat_param_0"}
    if found - expected or "flat_param_0" not in lengths:
        odd = some(sorted(found - expected)) or "the root's flat_param_0 is missing"
        return {}, [_cannot(f"unexpected keys: {odd} with {layers} layers", "pass files with shard_metadata")]
    if found and found != expected:
        lacking = some(sorted(expected - found))
        problem = Problem(ErrorKind.SOURCE, "missing-tensors", f"cfg has {layers} layers, but there is no {lacking}")
        return {}, [replace(problem, hint="the checkpoint is incomplete: save or copy it again")]

    def inside(index: int) -> list[str]:
        if block == 1:
            return [""]
        return [f"layers.{j}." for j in range(min(block, layers - index * block))]

    if found:
        return {"": [], **{f"decoder.layers.{i}": inside(i) for i in range(blocks)}}, []
    return {"": [f"decoder.layers.{i}.{below}" for i in range(blocks) for below in inside(i)]}, []


def _stated_shape(config: ModelConfig, num_mp: int, fused: bool) -> Shape:
    """Return the shape that cfg describes."""
    embed, inner = config.embed_dim or 0, config.ffn_dim or 0
    gate = config.activation.endswith("glu")
    return Shape(
        embed=embed,
        attention=embed // num_mp,
        inner=inner // num_mp,
        positions=(config.positions or 0) + _EXTRA_POSITIONS if config.learned_positions else 0,
        fused=fused,
        bias=not config.no_bias,
        last_bias=not config.no_bias,
        norms=not config.no_affine_norms,
        gate=gate,
        inner_norm=config.inner_norms,
        final_norm=not (config.no_affine_norms or config.no_final_norm),
        input=config.input_dim or embed,
        output=config.output_dim or embed,
        untied=config.ties_embeddings is False,
    )


def _other_shapes(stated: Shape) -> Iterator[Shape]:
    """Yield the shapes that differ from the stated one in what cfg is known to be silent about."""
    for last_bias, inner_norm in itertools.product((False, True), repeat=2):
        other = replace(stated, last_bias=last_bias, inner_norm=inner_norm)
        if other != stated:
            yield other


def _fit(
    lengths: Mapping[str, int],
    unit_layers: Mapping[str, list[str]],
    shape: Shape,
    num_mp: int,
    num_dp: int,
    config: ModelConfig,
) -> list[tuple[FlatParameter, ...]]:
    """Return every way in which parameters of this shape come out to the lengths: mostly none or one."""
    layer = layer_entries(shape)
    units: dict[str, list[Entry]] = {}
    for path, prefixes in unit_layers.items():
        units[path] = [(prefix + name, dims) for prefix in prefixes for name, dims in layer]
        if path and fsdp_chunk(_total(units[path]), num_dp) != lengths[f"{path}.flat_param_0"]:
            return []
    return [
        tuple(_parameter(path, entries if path else root) for path, entries in units.items())
        for root in _roots(lengths["flat_param_0"], units[""], shape, num_mp, num_dp, config)
    ]


def _parameter(path: str, entries: list[Entry]) -> FlatParameter:
    names, shapes = zip(*entries, strict=True)
    return FlatParameter(path, f"{path}.flat_param_0" if path else "flat_param_0", names, shapes)


def _roots(
    length: int, layers: list[Entry], shape: Shape, num_mp: int, num_dp: int, config: ModelConfig
) -> Iterator[list[Entry]]:
    """Yield the root's parameters for every number of vocabulary rows with which its length comes out."""

    def root(rows: int) -> list[Entry]:
        d = shape.embed
        return [
            ("decoder.embed_tokens.weight", (rows, shape.input)),
            *([("decoder.project_in_dim.weight", (d, shape.input))] if shape.input != d else []),
            *([("decoder.embed_positions.weight", (shape.positions, d))] if shape.positions else []),
            *layers,
            *([("decoder.layer_norm.weight", (d,)), ("decoder.layer_norm.bias", (d,))] if shape.final_norm else []),
            *([("decoder.project_out_dim.weight", (shape.output, d))] if shape.output != d else []),
            *([("decoder.output_projection.weight", (rows, shape.output))] if shape.untied else []),
        ]

    without = _total(root(0))
    row = _total(root(1)) - without
    # ceil(n / W) == length leaves W possible n; a row of the embedding is wider than that in any model of size.
    fewest, most = (length - 1) * num_dp + 1 - without, length * num_dp - without
    for rows in range(max(1, -(-fewest // row)), most // row + 1):
        if _is_vocabulary(rows * num_mp, config):
            yield root(rows)


def _is_vocabulary(rows: int, config: ModelConfig) -> bool:
    """Hold the number of rows against the dictionary's size, where cfg states it.

    Four special symbols are added to it, and then, by some trainers, filler up to a multiple of eight (metaseq
    `Dictionary.pad_to_multiple_`; bos, pad, eos and unk).
    """
    if config.vocabulary is None:
        return True
    symbols = config.vocabulary + 4
    return rows in (symbols, -(-symbols // 8) * 8)


def _total(entries: list[Entry]) -> int:
    return sum(math.prod(dims) for _, dims in entries)
