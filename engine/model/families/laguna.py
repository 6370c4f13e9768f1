"""Laguna: softplus gates over heads, as many heads as each layer says, sigmoid-routed experts with capped logits."""

from types import MappingProxyType

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    LLAMA,
    QK_NORM,
    activation,
    decoder,
    gqa,
    in_layers,
    layer_windows,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, sparse_layers
from firstlight.engine.model.spec import MLP, Attention, ModelSpec, Rope

# Rotary base; part of a head that rotates.
DEFAULTS = MappingProxyType({"full_attention": (500000.0, 0.5), "sliding_attention": (10000.0, 1.0)})


def _positions(config: Config, kind: str, size: int) -> Rope:
    named = config.get("rope_parameters") or {}
    theta, partial = DEFAULTS[kind]
    return rope(config, size, theta, kind=kind, partial=1.0 if named else partial)


def spec(config: Config) -> ModelSpec:
    count, size = config.size("num_hidden_layers"), int(config.get("head_dim", 128))
    windows, norm = layer_windows(config, config.stated("sliding_window", absent=512)), rms(config)
    if "layer_types" not in config:
        windows = [None] * count
    bias, gating = bool(config.get("attention_bias", False)), config.get("gating")
    gating = True if gating is None else gating
    if gating not in (True, "per-head", "per-element"):
        config.unsupported("gating", gating, "true, per-head or per-element")
    heads = config.get("num_attention_heads_per_layer", [config.size("num_attention_heads")] * count)
    one_a_layer(config, "num_attention_heads_per_layer", heads)
    config.only("moe_apply_router_weight_on_input", False, default=False)

    def attention(index: int) -> Attention:
        kind = "full_attention" if windows[index] is None else "sliding_attention"
        return gqa(
            config,
            num_heads=int(heads[index]),
            head_dim=size,
            scale=size**-0.5,
            rope=_positions(config, kind, size),
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm,
            gate="own" if gating == "per-element" else "head",
            gate_by="softplus",
        )

    cap = float(config.get("moe_router_logit_softcapping", 0.0))
    chooses = router(
        config,
        scoring="sigmoid",
        correction_bias=True,
        eps=0.0,
        scale=float(config.get("moe_routed_scaling_factor", 1.0)),
        logit_softcap=cap if cap > 0 else None,
    )
    shared = MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=activation(config))
    moe, dense, sparse = mixture(config, chooses, shared=shared), mlp(config), sparse_layers(config, 1)
    return decoder(config, "laguna", attention, lambda i: moe if sparse[i] else dense, norm=norm)


RULES = LLAMA + QK_NORM + MIXTURE + in_layers({"self_attn.g_proj": "mixer.gate"})
FAMILY = Family(
    name="laguna", model_types=("laguna",), spec=spec, rules=RULES, silent={"laguna": {"num_key_value_heads": 8}}
)
