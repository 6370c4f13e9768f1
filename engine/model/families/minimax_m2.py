"""MiniMax-M2: queries and keys normed over all heads, part of each head rotated, sigmoid-routed experts with a bias."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, QK_NORM, TRUNK, decoder, gqa, rms, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    size = int(config.get("head_dim", 128))
    config.only("use_qk_norm", True, default=True)
    config.only("qk_norm_type", "per_layer", default="per_layer")
    config.only("scoring_func", "sigmoid", default="sigmoid")
    config.only("use_routing_bias", True, default=True)
    config.only("shared_intermediate_size", 0, default=0)
    positions = rope(config, size, 5000000.0, partial=int(config.get("rotary_dim", size)) / size)
    attention = gqa(config, head_dim=size, scale=size**-0.5, rope=positions, qk_norm=rms(config), qk_norm_over="width")
    moe = mixture(config, router(config, scoring="sigmoid", correction_bias=True, eps=0.0), "intermediate_size")
    return decoder(config, "minimax_m2", attention, moe)


RULES = TRUNK + ATTENTION + QK_NORM + MIXTURE
FAMILY = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    spec=spec,
    rules=RULES,
    silent={"minimax_m2": {"num_key_value_heads": 8}},
)
