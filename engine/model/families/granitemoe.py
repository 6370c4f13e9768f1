"""Granite 3 MoE: Granite's multipliers around softmax over the chosen experts, with a shared expert or without."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, TRUNK, activation, decoder, gqa
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import MLP, ModelSpec


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    bias, shared = bool(config.get("attention_bias", False)), None
    if model_type == "granitemoeshared" and (width := int(config.get("shared_intermediate_size", 0))):
        shared = MLP(intermediate=width, activation=activation(config))
    attention = gqa(
        config,
        scale=float(config.get("attention_multiplier", 1.0)),
        qkv_bias=bias,
        output_bias=bias,
    )
    moe = mixture(config, router(config, score_chosen=True), "intermediate_size", shared=shared)
    return decoder(
        config,
        model_type,
        attention,
        moe,
        layer={"residual_scale": float(config.get("residual_multiplier", 1.0))},
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        scales_pictures=True,
        logit_scale=1.0 / config.positive("logits_scaling", config.get("logits_scaling", 1.0)),
    )


RULES = TRUNK + ATTENTION + MIXTURE
FAMILY = Family(name="granitemoe", model_types=("granitemoe", "granitemoeshared"), spec=spec, rules=RULES)
