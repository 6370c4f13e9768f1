"""MiniMax-M3 (text): blocks of keys chosen by an indexer, queries and keys normed by head, clamped experts.

Releases name a decoder inside of a model with pictures (`language_model.model.`), and the indexer's tensors
`index_q_proj`; transformers `indexer.q_proj`.
"""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    QK_NORM,
    TRUNK,
    decoder,
    gqa,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.rules import ignored, rule
from firstlight.engine.model.spec import MLP, Attention, BlockIndexer, ModelSpec, Norm, Rope
from firstlight.kernels.gated_activation.names import named

SPARSE, FULL = "minimax_m3_sparse", "full_attention"
OLDER = {  # keys of `sparse_attention_config`: the indexer's own
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}


def layer_kinds(config: Config, key: str, flags: Any, kinds: tuple[str, str]) -> list[str]:
    """`kinds` (without, with) by layer: by name under `key`, or by `flags`, one a layer."""
    silent = [kinds[1 if key == "mlp_layer_types" else 0]] * config.size("num_hidden_layers")
    found = config.get(key) or (silent if flags is None else [kinds[bool(flag)] for flag in flags])
    return one_a_layer(config, key, found, *kinds)


def indexer(config: Config, norm: Norm, positions: Rope, kinds: list[str]) -> BlockIndexer:
    """From the keys of transformers, or from the releases' nested ones, which win."""
    older = config.sub("sparse_attention_config")
    older.only("sparse_init_block", 0, default=0)
    older.only("sparse_score_type", "max", default="max")
    without_values = older.get("sparse_disable_index_value")
    if without_values is not None and not all(
        off for off, kind in zip(without_values, kinds, strict=False) if kind == SPARSE
    ):
        older.unsupported("sparse_disable_index_value", without_values, "1 in every layer with an indexer")
    values = {ours: int(older.get(theirs, config.get(ours, default))) for ours, (theirs, default) in OLDER.items()}
    if values["index_head_dim"] < positions.dim:
        config.refuse("index_head_dim", values["index_head_dim"], f"at least the {positions.dim} dims that rotate")
    heads = config.size("num_attention_heads")
    if heads % values["index_n_heads"]:
        config.refuse("index_n_heads", values["index_n_heads"], f"a divisor of num_attention_heads {heads}")
    return BlockIndexer(
        num_heads=values["index_n_heads"],
        head_dim=values["index_head_dim"],
        block=values["index_block_size"],
        topk=values["index_topk_blocks"],
        local=values["index_local_blocks"],
        norm=norm,
        rope=positions,
    )


def spec(config: Config) -> ModelSpec:
    for key, value in (
        ("attention_output_gate", False),
        ("qk_norm_type", "per_head"),
        ("scoring_func", "sigmoid"),
        ("use_gemma_norm", True),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
        ("n_shared_experts", 1),
    ):
        config.only(key, value, default=value)
    config.only("hidden_act", "swigluoai", "silu", default="silu")  # what the activation below makes of either
    config.get("moe_intermediate_size"), config.get("num_mtp_modules"), config.get("num_nextn_predict_layers")
    config.assume(**{} if "rope_theta" in config or "rope_parameters" in config else {"rope_theta": 5000000.0})
    norm, size = msgspec.structs.replace(rms(config), offset=1.0), int(config.get("head_dim", 128))
    positions, width = rope(config, size, partial=1.0), config.get("rotary_dim")
    if width is not None and width != positions.dim:
        config.warn(
            "conflicting-flag",
            "rotary_dim is not the share of head_dim that rotates; the share is used, as the reference does",
            expected=f"rotary_dim = {positions.dim}",
            found=f"rotary_dim = {width}",
        )
    older = config.sub("sparse_attention_config")
    flags = older.get("sparse_attention_freq") if older.get("use_sparse_attention", True) else None
    kinds = layer_kinds(config, "layer_types", flags, (FULL, SPARSE))
    full = gqa(config, head_dim=size, scale=size**-0.5, rope=positions, qk_norm=norm)
    sparse = msgspec.structs.replace(full, blocks=indexer(config, norm, positions, kinds))
    limit = config.positive("swiglu_limit", config.get("swiglu_limit", 7.0))
    act = named("clamped", limit, config.positive("swiglu_alpha", config.get("swiglu_alpha", 1.702)), 1.0)
    scale = float(config.get("routed_scaling_factor", 2.0))
    chooses = router(config, scoring="sigmoid", correction_bias=True, eps=0.0, scale=scale)
    shared = MLP(intermediate=int(config.get("shared_intermediate_size", 3072)), activation=act)
    moe = mixture(config, chooses, "intermediate_size", shared=shared, activation=act)
    dense = MLP(intermediate=int(config.get("dense_intermediate_size", 12288)), activation=act)
    start = config.get("first_k_dense_replace")
    routed = config.get("moe_layer_freq", start and [int(i >= start) for i in range(config.size("num_hidden_layers"))])
    routes = layer_kinds(config, "mlp_layer_types", routed, ("dense", "sparse"))

    def attention(index: int) -> Attention:
        return sparse if kinds[index] == SPARSE else full

    return decoder(config, "minimax_m3", attention, lambda i: moe if routes[i] == "sparse" else dense, norm=norm)


_L = "(model.|)layers.{i}."
RULES = (
    *TRUNK,
    *ATTENTION,
    *QK_NORM,
    *(
        rule(f"{_L}self_attn.(indexer.|index_){part}_{kind}.weight", f"layers.{{i}}.mixer.blocks.{part}{ours}.weight")
        for part in "qk"
        for kind, ours in (("proj", ""), ("norm", "_norm"))
    ),
    rule(_L + "mlp.gate_up_proj.weight", "layers.{i}.ffn.gate.weight", "layers.{i}.ffn.up.weight"),
    *DENSE,
    *MIXTURE,
    rule(
        _L + "(mlp|block_sparse_moe).shared_experts.gate_up_proj.weight",
        *(f"layers.{{i}}.ffn.shared.{part}.weight" for part in ("gate", "up")),
    ),
    ignored("(model.|)mtp.{*}", "multi-token-prediction layer, not used for inference"),
)
FAMILY = Family(
    name="minimax_m3",
    model_types=("minimax_m3_vl_text",),
    spec=spec,
    rules=RULES,
    silent={"minimax_m3_vl_text": {"num_key_value_heads": 4}},
)
