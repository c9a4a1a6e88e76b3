"""Pure. The rules of metaseq's decoder-only transformers (OPT and its relatives).

Sources: metaseq `megatron/mpu/layers.py` (VocabParallelEmbedding, ColumnParallelLinear: axis 0; RowParallelLinear:
axis 1) and `modules/multihead_attention.py` (a fused projection holds K, V, Q, in this order, despite its name). The
order of the rules is that of `TransformerDecoder.__init__` and `TransformerDecoderLayer.__init__`.
"""

from tasks.family import Family, Rule

_WEIGHT_BIAS = r"\.(weight|bias)"


def _attention_input(name: str) -> Rule:
    return Rule(
        rf"self_attn\.{name}_proj{_WEIGHT_BIAS}",
        cut=0,
        role="attention input",
        member_of="self_attn.qkv_proj.{}",
        unit="head",
    )


OPT = Family(
    name="opt",
    # Blocks of layers (`fsdp_checkpoint_wrap_layer_frequency` > 1) have a second number.
    layer_pattern=r"decoder\.layers\.(\d+)\.(?:layers\.(\d+)\.)?",
    rules=(
        Rule(r"decoder\.version", cut=None, per_layer=False, buffer=True),
        Rule(r"decoder\.embed_tokens\.weight", cut=0, per_layer=False, role="token embedding", unit="vocabulary entry"),
        Rule(r"decoder\.project_in_dim\.weight", cut=None, per_layer=False),
        Rule(r"decoder\.embed_positions\.weight", cut=None, per_layer=False),
        Rule(r"decoder\.embed_positions\._float_tensor", cut=None, per_layer=False, buffer=True),
        Rule(rf"decoder\.layernorm_embedding{_WEIGHT_BIAS}", cut=None, per_layer=False),
        Rule(
            rf"self_attn\.qkv_proj{_WEIGHT_BIAS}",
            cut=0,
            role="attention input",
            members=("self_attn.k_proj.{}", "self_attn.v_proj.{}", "self_attn.q_proj.{}"),
            unit="head",
        ),
        _attention_input("k"),
        _attention_input("v"),
        _attention_input("q"),
        Rule(r"self_attn\.out_proj\.weight", cut=1, role="attention output", unit="head"),
        Rule(r"self_attn\.out_proj\.bias", cut=None),
        Rule(rf"self_attn_layer_norm{_WEIGHT_BIAS}", cut=None),
        Rule(rf"ffn_layernorm{_WEIGHT_BIAS}", cut=0, unit="inner feature"),
        Rule(rf"fc1{_WEIGHT_BIAS}", cut=0, role="feed-forward input", unit="inner feature"),
        Rule(rf"activation_fn\.gate{_WEIGHT_BIAS}", cut=0, unit="inner feature"),
        Rule(r"fc2\.weight", cut=1, role="feed-forward output", unit="inner feature"),
        Rule(r"fc2\.bias", cut=None),
        Rule(rf"final_layer_norm{_WEIGHT_BIAS}", cut=None),
        # The 350M model was trained without a final norm, and pre-2023 loaders drop it: its absence is no fault.
        Rule(rf"decoder\.layer_norm{_WEIGHT_BIAS}", cut=None, per_layer=False),
        Rule(r"decoder\.project_out_dim\.weight", cut=None, per_layer=False),
        Rule(
            r"decoder\.output_projection\.weight",
            cut=0,
            per_layer=False,
            tied_to="decoder.embed_tokens.weight",
            unit="vocabulary entry",
        ),
    ),
)
