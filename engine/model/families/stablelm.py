"""StableLM 2 and StableCode: LayerNorms, a quarter of each head rotated, blocks one after the other or side by side."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    PRE,
    TRUNK,
    decoder,
    gqa,
    head_dim,
    layer_norm,
    mlp,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    by_head = layer_norm(config, "layer_norm_eps", bias=False) if config.get("qk_layernorm", False) else None
    parallel = bool(config.get("use_parallel_residual", False))
    positions = rope(config, head_dim(config), partial=0.25)
    bias = bool(config.get("use_qkv_bias", False))
    attention = gqa(config, rope=positions, qkv_bias=bias, qk_norm=by_head, qk_norm_over="each")
    feed_forward = mlp(config)
    return decoder(
        config,
        "stablelm",
        attention,
        feed_forward,
        norm=layer_norm(config, "layer_norm_eps"),
        norms=("mixer_norm",) if parallel else PRE,
        layer={"parallel": parallel},
    )


NORMS = tuple(
    rule(
        f"(model.|)layers.{{i}}.self_attn.{part}_layernorm.norms.{{h}}.weight",
        f"layers.{{i}}.mixer.{part}_norm.{{h}}.weight",
    )
    for part in "qk"
)
RULES = TRUNK + ATTENTION + NORMS + DENSE
FAMILY = Family(name="stablelm", model_types=("stablelm",), spec=spec, rules=RULES)
