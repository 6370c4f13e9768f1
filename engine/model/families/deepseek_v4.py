"""DeepSeek-V4: hyper-connected streams, a window beside compressed spans, experts of the first layers by table.

Tensors have the releases' own names (`attn.wq_a`, `hc_attn_fn`) or transformers' (`self_attn.q_a_proj`, `attn_hc.fn`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder, rms, rope
from firstlight.engine.model.families.deepseek_v3 import with_extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.rules import ignored, rule
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
    for ratio in set(ratios) - set(BY_RATIO):
        config.unsupported("compress_ratios", ratio, "0, 4 or 128")
    kinds = config.get("layer_types", [BY_RATIO[ratio] for ratio in ratios])
    for kind in set(kinds) - set(BY_RATIO.values()):
        config.unsupported("layer_types", kind, " or ".join(BY_RATIO.values()))
    if len(kinds) < count:
        config.refuse("layer_types", f"{len(kinds)} entries", f"{count} entries, one a layer")
    return list(kinds)


def _ropes(config: Config, size: int) -> tuple[Rope, Rope]:
    """(of layers with a window alone, of those that compress): only the second are stretched, without YaRN's factor."""
    rotated = int(config.get("qk_rope_head_dim", size * config.get("partial_rotary_factor", 0.125)))
    named, far_theta = config.get("rope_parameters") or {}, float(config.get("compress_rope_theta", 160000.0))
    config.get("rope_theta")
    if "main" in named and "compress" in named:
        return (
            rope(config, size, interleaved=True, kind="main"),
            rope(config, size, interleaved=True, kind="compress"),
        )
    far = rope(config, rotated, interleaved=True)
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
    for kind in set(routed) - set(experts):
        config.unsupported("mlp_layer_types", kind, " or ".join(experts))
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


_L, _A, _F = "(model.|)layers.{i}.", "(model.|)layers.{i}.(attn|self_attn).", "(model.|)layers.{i}.(ffn|mlp)."
_SHARES = {"fn": "project", "base": "base", "scale": "scale"}
_COMPRESSOR = {
    "(wkv|kv_proj).weight": "kv.weight",
    "(wgate|gate_proj).weight": "gate.weight",
    "(ape|position_bias)": "position_bias",
    "(norm|kv_norm).weight": "norm.weight",
}
_NAMES = {
    _L + "(attn_norm|input_layernorm).weight": "mixer_norm.weight",
    _L + "(ffn_norm|post_attention_layernorm).weight": "ffn_norm.weight",
    _A + "(wq_a|q_a_proj).weight": "mixer.q_a.weight",
    _A + "(q_norm|q_a_norm).weight": "mixer.q_a_norm.weight",
    _A + "(wq_b|q_b_proj).weight": "mixer.q_b.weight",
    _A + "(wkv|kv_proj).weight": "mixer.kv.weight",
    _A + "(norm|kv_norm).weight": "mixer.kv_norm.weight",
    _A + "(wo_a|o_a_proj).weight": "mixer.o_a.weight",
    _A + "(wo_b|o_b_proj).weight": "mixer.o_b.weight",
    _A + "(attn_sink|sinks)": "mixer.sinks",
    _A + "(indexer.wq_b|compressor.indexer.q_b_proj).weight": "mixer.indexer.q.weight",
    _A + "(indexer|compressor.indexer.scorer).weights_proj.weight": "mixer.indexer.weights.weight",
    _F + "gate.weight": "ffn.router.weight",
    _F + "gate.(bias|e_score_correction_bias)": "ffn.router.correction_bias",
    _F + "gate.tid2eid": "ffn.router.table",
    **{
        f"{_A}{block}.{theirs}": f"mixer.{own}.{ours}"
        for block, own in (
            ("compressor", "compressor"),
            ("(indexer.compressor|compressor.indexer)", "indexer.compressor"),
        )
        for theirs, ours in _COMPRESSOR.items()
    },
    **{
        f"{_L}(hc_{site}_|{site}_hc.){theirs}": f"residual.{own}.{ours}"
        for site, own in (("attn", "mixer"), ("ffn", "ffn"))
        for theirs, ours in _SHARES.items()
    },
    **{
        f"{_F}{theirs}({old}|{new}_proj).weight": f"ffn.{ours}{new}.weight"
        for theirs, ours in (("experts.{e}.", "experts.{e}."), ("shared_experts.", "shared."))
        for old, new in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
}
_E = "layers.{i}.ffn.experts.{e}."
RULES = (
    rule("(model.|)(embed|embed_tokens).weight", "embed.weight"),
    rule("(model.|)norm.weight", "norm.weight"),
    rule("(lm_head|head).weight", "head.weight"),
    *(rule(f"(model.|)(hc_head.hc_|hc_head_){theirs}", f"residual.read.{ours}") for theirs, ours in _SHARES.items()),
    *(rule(theirs, "layers.{i}." + ours) for theirs, ours in _NAMES.items()),
    rule(_F + "experts.gate_up_proj", _E + "gate.weight", _E + "up.weight", stacked=True),
    rule(_F + "experts.down_proj", _E + "down.weight", stacked=True),
    ignored("(model.|)mtp.{*}", "multi-token-prediction layer, not used for inference"),
)
FAMILY = Family(name="deepseek_v4", model_types=("deepseek_v4",), spec=spec, rules=RULES)
