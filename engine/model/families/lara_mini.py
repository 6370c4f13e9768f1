"""Lara 4 Mini: gated delta attention, windows, and layers that see all without positions; experts in every layer."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    QK_NORM,
    TRUNK,
    activation,
    decoder,
    gqa,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.families.qwen3_next import DELTA_RULES, delta_attention
from firstlight.engine.model.families.state_spaces import layer_kinds
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, Mixer, ModelSpec

KINDS = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def attention(config: Config, kind: str) -> Attention:
    size, bias = int(config.get("head_dim", 128)), bool(config.get("attention_bias", False))
    has_window = kind == "sliding_attention"
    return gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=rope(config, size) if has_window else None,
        window=int(config.get("sliding_window", 512)) if has_window else None,
        qk_norm=rms(config),
        qkv_bias=bias,
        output_bias=bias,
    )


def spec(config: Config) -> ModelSpec:
    count, kinds = config.size("num_hidden_layers"), layer_kinds(config, *dict.fromkeys(KINDS))
    kinds = one_a_layer(config, "layer_types", kinds or [KINDS[index % len(KINDS)] for index in range(count)])
    mixers: dict[str, Mixer] = {kind: attention(config, kind) for kind in ("sliding_attention", "full_attention")}
    mixers["linear_attention"] = delta_attention(config, fused=False)
    chooses = router(config, normalize=bool(config.get("norm_topk_prob", True)), float32=True)
    shared = MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=activation(config))
    moe = mixture(config, chooses, shared=shared)
    return decoder(config, "lara_mini", lambda i: mixers[kinds[i]], moe, tie_default=True)


_A, _P = "(model.|)layers.{i}.linear_attn.", "layers.{i}.mixer."
RULES = (
    rule(_A + "in_proj.weight", *(f"{_P}{part}.weight" for part in ("q", "k", "v", "g", "b", "f"))),
    rule(_A + "out_norm.weight", _P + "norm.weight"),
    *TRUNK,
    *ATTENTION,
    *QK_NORM,
    *DELTA_RULES,
    *MIXTURE,
)
FAMILY = Family(
    name="lara_mini",
    model_types=("lara_mini",),
    spec=spec,
    rules=RULES,
    silent={"lara_mini": {"num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}},
)
