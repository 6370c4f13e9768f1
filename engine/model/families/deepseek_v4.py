"""DeepSeek-V4: hyper-connected streams, a window beside compressed spans, experts of the first layers by table.

Its tensors' names stand in `deepseek_v4_names.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder, rms, rope
from firstlight.engine.model.families.deepseek_v3 import with_extra_layers
from firstlight.engine.model.families.deepseek_v4_names import RULES
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.spec import (
    MLP,
    CompressedAttention,
    Compressor,
    HyperConnections,
    ModelSpec,
    MoE,
    Rope,
    SpanIndexer,
)

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}


def _kinds(config: Config) -> list[str]:
    """The kind of each layer: `layer_types`, or the releases' ratio of tokens to entries."""
    count, ratios = config.size("num_hidden_layers"), config.get("compress_ratios", [])
    for ratio in ratios:
        if ratio not in BY_RATIO:
            config.unsupported("compress_ratios", ratio, "0, 4 or 128")
    kinds = config.get("layer_types", [BY_RATIO[ratio] for ratio in ratios])
    for kind in kinds:
        if kind not in BY_RATIO.values():
            config.unsupported("layer_types", kind, " or ".join(BY_RATIO.values()))
    if len(kinds) < count:  # releases list their extra layers as well
        config.refuse("layer_types", f"{len(kinds)} entries", f"{count} entries, one a layer")
    return list(kinds)


def _ropes(config: Config, size: int) -> tuple[Rope, Rope]:
    """(of layers with a window alone, of those that compress): only the second are stretched, without YaRN's factor."""
    rotated = int(config.get("qk_rope_head_dim", size * config.get("partial_rotary_factor", 0.125)))
    named, far_theta = config.get("rope_parameters") or {}, float(config.get("compress_rope_theta", 160000.0))
    config.get("rope_theta")
    if "main" in named and "compress" in named:
        return (
            rope(config, size, interleaved=True, partial=1.0, kind="main"),
            rope(config, size, interleaved=True, partial=1.0, kind="compress"),
        )
    far = rope(config, rotated, interleaved=True, read_elsewhere=("partial_rotary_factor",))
    scaling = far.scaling
    if scaling is not None and scaling.attention_factor is None:
        scaling = msgspec.structs.replace(scaling, attention_factor=1.0)
    return msgspec.structs.replace(far, scaling=None), msgspec.structs.replace(far, theta=far_theta, scaling=scaling)


def _mixers(config: Config) -> dict[str, CompressedAttention]:
    config.only("num_key_value_heads", 1, default=1)
    config.only("attention_bias", False, default=False)
    size, norm = config.size("head_dim"), rms(config)
    plain, stretched = _ropes(config, size)
    rates = {SPARSE: 4, HEAVY: 128, **config.get("compress_rates", {})}
    if any(type(rate) is not int or rate < 1 for rate in rates.values()):
        config.refuse("compress_rates", rates, "positive whole numbers")
    values: dict[str, Any] = {
        "num_heads": config.size("num_attention_heads"),
        "head_dim": size,
        "scale": size**-0.5,
        "q_lora_rank": config.size("q_lora_rank"),
        "groups": config.size("o_groups"),
        "o_lora_rank": config.size("o_lora_rank"),
        "window": config.size("sliding_window"),
        "norm": norm,
    }
    if values["num_heads"] % values["groups"]:
        config.refuse("o_groups", values["groups"], f"a divisor of num_attention_heads {values['num_heads']}")
    sparse = Compressor(rate=int(rates[SPARSE]), dim=size, norm=norm, overlap=True)
    indexer = SpanIndexer(
        num_heads=config.size("index_n_heads"),
        topk=config.size("index_topk"),
        compressor=msgspec.structs.replace(sparse, dim=config.size("index_head_dim")),
    )
    heavy = Compressor(rate=int(rates[HEAVY]), dim=size, norm=norm)
    return {
        WINDOW: CompressedAttention(**values, rope=plain),
        SPARSE: CompressedAttention(**values, rope=stretched, compressor=sparse, indexer=indexer),
        HEAVY: CompressedAttention(**values, rope=stretched, compressor=heavy),
    }


def _experts(config: Config) -> dict[str, MoE]:
    """Experts by table, and by DeepSeek-V3's choice with other scores; gates and values are cut off at the limit."""
    for key, value in (("topk_method", "noaux_tc"), ("n_shared_experts", 1), ("hidden_act", "silu")):
        config.only(key, value, default=value)
    config.only("mlp_bias", False, default=False)
    config.only("norm_topk_prob", True, default=True)
    config.get("expert_dtype"), config.get("intermediate_size")  # how experts are stored; another name of their width
    limit = config.positive("swiglu_limit", config.get("swiglu_limit", 10.0))
    act, scale = f"clamped({limit:g},1,0)", float(config.get("routed_scaling_factor", 1.5))
    scoring = config.only("scoring_func", "sqrtsoftplus", "sigmoid", "softmax", default="sqrtsoftplus")
    shared = MLP(intermediate=config.size("moe_intermediate_size"), activation=act)
    choices: dict[str, dict[str, Any]] = {
        "hash_moe": {"hashed": config.size("vocab_size")},
        "moe": {"correction_bias": True},
    }
    return {
        kind: mixture(config, router(config, scoring=scoring, scale=scale, **choice), shared=shared, activation=act)
        for kind, choice in choices.items()
    }


def spec(config: Config) -> ModelSpec:
    count, kinds, mixers, experts = config.size("num_hidden_layers"), _kinds(config), _mixers(config), _experts(config)
    tables = int(config.get("num_hash_layers", 3))
    routed = config.get("mlp_layer_types", ["hash_moe" if index < tables else "moe" for index in range(count)])
    for kind in routed:
        if kind not in experts:
            config.unsupported("mlp_layer_types", kind, " or ".join(experts))
    if len(routed) < count:
        config.refuse("mlp_layer_types", f"{len(routed)} entries", f"{count} entries, one a layer")
    streams = HyperConnections(
        streams=config.size("hc_mult"),
        iterations=config.size("hc_sinkhorn_iters"),
        eps=float(config.get("hc_eps", 1e-6)),
        norm_eps=rms(config).eps,
    )
    plain = decoder(
        config, "deepseek_v4", lambda i: mixers[kinds[i]], lambda i: experts[routed[i]], layer={"residual": streams}
    )
    extra = msgspec.structs.replace(plain.layers[-1], mixer=mixers[WINDOW], ffn=experts["moe"])
    return with_extra_layers(config, plain, extra, ends=False)


FAMILY = Family(name="deepseek_v4", model_types=("deepseek_v4",), spec=spec, rules=RULES)
