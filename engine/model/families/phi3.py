"""Phi-3, Phi-3.5, Phi-4: Llama's layout with q, k, v in one tensor and gate, up in another; longrope, part rotated."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    FUSED_ATTENTION,
    FUSED_DENSE,
    TRUNK,
    decoder,
    gqa,
    head_dim,
    mlp,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(key, False, default=False)
    config.only("full_attn_mod", 1, default=1)
    config.only("interpolate_factor", 1, default=1)
    config.get("original_max_position_embeddings")  # read with the rotary scaling, where there is one
    positions = rope(config, head_dim(config), partial=1.0)
    attention = gqa(config, rope=positions, window=config.get("sliding_window"))
    feed_forward = mlp(config)
    return decoder(config, "phi3", attention, feed_forward, norm=rms(config, 1e-5))


RULES = TRUNK + FUSED_ATTENTION + FUSED_DENSE + ATTENTION + DENSE
FAMILY = Family(name="phi3", model_types=("phi3",), spec=spec, rules=RULES)
