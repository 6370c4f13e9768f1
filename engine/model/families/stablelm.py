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
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    config.only("qk_layernorm", False, default=False)
    parallel = bool(config.get("use_parallel_residual", False))
    positions = rope(config, head_dim(config), partial=0.25)
    attention = gqa(config, rope=positions, qkv_bias=bool(config.get("use_qkv_bias", False)))
    feed_forward = mlp(config)
    return decoder(
        config,
        "stablelm",
        lambda i: attention,
        lambda i: feed_forward,
        norm=layer_norm(config, "layer_norm_eps"),
        norms=("mixer_norm",) if parallel else PRE,
        layer={"parallel": parallel},
    )


RULES = TRUNK + ATTENTION + DENSE
FAMILY = Family(name="stablelm", model_types=("stablelm",), spec=spec, rules=RULES)
