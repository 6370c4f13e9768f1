"""Apertus: queries and keys normed by head, xIELU with learned numbers, no gate."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    QK_NORM,
    decoder,
    gqa,
    head_dim,
    in_layers,
    rms,
    rope,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, ModelSpec

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def spec(config: Config) -> ModelSpec:
    norm, bias = rms(config, 1e-5), bool(config.get("attention_bias", False))
    for key, value in (("post_norm", False), ("qk_norm", True), ("mlp_bias", False)):
        config.only(key, value, default=value)
    config.only("hidden_act", "xielu", default="xielu")
    silent_rope(config, **ROPE)
    positions = rope(config, head_dim(config), 12000000.0)
    attention = gqa(config, rope=positions, qk_norm=norm, qkv_bias=bias, output_bias=bias)
    feed_forward = MLP(intermediate=config.size("intermediate_size"), activation="xielu", gated=False)
    return decoder(config, "apertus", attention, feed_forward, norm=norm)


_ACT = "(model.|)layers.{i}.mlp.act_fn."
RULES = (
    *ENDS,
    *in_layers({"attention_layernorm": "mixer_norm", "feedforward_layernorm": "ffn_norm"}),
    *ATTENTION,
    *QK_NORM,
    *DENSE,
    *(rule(_ACT + name, f"layers.{{i}}.ffn.act.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")),
)
FAMILY = Family(name="apertus", model_types=("apertus",), spec=spec, rules=RULES)
