"""Pure. The dimensions of an OPT model, and how metaseq lays its parameters out on one model-parallel part.

>>> OPT_175B.num_parameters // 10**9
174
>>> [path for path, _ in small_shape(0.5).units(1)][:2]
['', 'decoder.layers.0']
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

Entry = tuple[str, tuple[int, ...]]
POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of the whole model."""

    layers: int
    embed: int
    inner: int
    heads: int
    vocabulary: int = 50272

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, entries in self.units(1) for _, shape in entries)

    def units(self, num_mp: int) -> list[tuple[str, list[Entry]]]:
        """List the FSDP units of one part: path, and its parameters in order with their shapes on that part."""
        d, f, a = self.embed, self.inner // num_mp, self.embed // num_mp
        root: list[Entry] = [
            ("decoder.embed_tokens.weight", (self.vocabulary // num_mp, d)),
            ("decoder.embed_positions.weight", (POSITIONS + 2, d)),
            ("decoder.layer_norm.weight", (d,)),
            ("decoder.layer_norm.bias", (d,)),
        ]
        layer: list[Entry] = [
            ("self_attn.qkv_proj.weight", (3 * a, d)),
            ("self_attn.qkv_proj.bias", (3 * a,)),
            ("self_attn.out_proj.weight", (d, a)),
            ("self_attn.out_proj.bias", (d,)),
            ("self_attn_layer_norm.weight", (d,)),
            ("self_attn_layer_norm.bias", (d,)),
            ("fc1.weight", (f, d)),
            ("fc1.bias", (f,)),
            ("fc2.weight", (d, f)),
            ("fc2.bias", (d,)),
            ("final_layer_norm.weight", (d,)),
            ("final_layer_norm.bias", (d,)),
        ]
        return [("", root), *((f"decoder.layers.{number}", layer) for number in range(self.layers))]

    def config(self, num_mp: int, num_dp: int) -> dict[str, Any]:
        """Make what `cfg` holds of the model."""
        model = argparse.Namespace(
            _name="transformer_lm_megatron",
            arch="transformer_lm_megatron",
            activation_fn="relu",
            decoder_layers=self.layers,
            decoder_embed_dim=self.embed,
            decoder_ffn_embed_dim=self.inner,
            decoder_attention_heads=self.heads,
            decoder_learned_pos=True,
            max_target_positions=POSITIONS,
            tokens_per_sample=POSITIONS,
            share_decoder_input_output_embed=True,
            model_parallel_size=num_mp,
            distributed_world_size=num_mp * num_dp,
            use_sharded_state=True,
            min_params_to_wrap=0,
        )
        return {"_name": None, "model": model, "distributed_training": {"distributed_world_size": num_mp * num_dp}}


OPT_175B = ModelShape(layers=96, embed=12288, inner=49152, heads=96)


def small_shape(gigabytes: float) -> ModelShape:
    """Return a model as wide as OPT-1.3B with as many layers as fit into so many gigabytes of fp16."""
    bare = ModelShape(0, 2048, 8192, 32)
    of_layer = ModelShape(1, 2048, 8192, 32).num_parameters - bare.num_parameters
    layers = max(1, round((gigabytes * 5e8 - bare.num_parameters) / of_layer))
    return ModelShape(layers, 2048, 8192, 32)


def cut_axis(name: str) -> int | None:
    """Return the axis that metaseq cuts over model-parallel parts; None where all parts hold the same."""
    if name.endswith(("out_proj.weight", "fc2.weight")):
        return 1
    return 0 if any(word in name for word in ("embed_tokens", "qkv_proj", "fc1")) else None


def chunk_of(entries: list[Entry], num_dp: int) -> int:
    """Return the length of each shard of a flat parameter, padding included."""
    return -(-sum(math.prod(shape) for _, shape in entries) // num_dp)


def shard_metadata(shape: ModelShape, num_mp: int, num_dp: int, dp: int) -> dict[str, Any]:
    """Describe the flat parameters of one shard, as fairscale does."""
    described = []
    for path, entries in shape.units(num_mp):
        numels = [math.prod(dims) for _, dims in entries]
        chunk = chunk_of(entries, num_dp)
        parameter = {
            "names": [name for name, _ in entries],
            "shapes": [dims for _, dims in entries],
            "numels": numels,
            "padding": chunk - max(0, min(chunk, sum(numels) - dp * chunk)),
        }
        tie = [("decoder.embed_tokens.weight", "decoder.output_projection.weight")]
        described.append(
            {
                "fsdp_path": path,
                "params": {"flat_param_0": parameter},
                "no_broadcast_optim_state": False,
                "shared_param_info": [] if path else tie,
            }
        )
    return {"param_metadata": described, "buffer_names": ["decoder.version"]}
