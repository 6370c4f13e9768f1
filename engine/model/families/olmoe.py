"""OLMoE: queries and keys normed over all heads and clamped, softmax-routed experts weighed as they are."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, PRE, QK_NORM, TRUNK, decoder, gqa, head_dim, rms, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.spec import ModelSpec


def model(config: Config, family: str, norms: tuple[str, ...], theta: float, eps: float) -> ModelSpec:
    """OLMoE, or FlexOlmo with its norms elsewhere and other defaults."""
    bias, norm = bool(config.get("attention_bias", False)), rms(config, eps)
    attention = gqa(
        config,
        rope=rope(config, head_dim(config), theta),
        qkv_bias=bias,
        output_bias=bias,
        clip=config.get("clip_qkv"),
        qk_norm=norm,
        qk_norm_over="width",
    )
    chooses = router(config, normalize=bool(config.get("norm_topk_prob", False)), eps=0.0)
    moe = mixture(config, chooses, "intermediate_size")
    return decoder(config, family, attention, moe, norm=norm, norms=norms)


def spec(config: Config) -> ModelSpec:
    return model(config, "olmoe", PRE, 10000.0, 1e-5)


RULES = TRUNK + ATTENTION + QK_NORM + MIXTURE
FAMILY = Family(name="olmoe", model_types=("olmoe",), spec=spec, rules=RULES)
