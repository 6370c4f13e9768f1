"""Mistral Small 3.1 and Mistral 3: Pixtral's tower, patches merged by an unfolding, Mistral's decoder."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.pixtral import PIXTRAL_RULES, pixtral
from firstlight.engine.model.families.vision_common import (
    acts,
    both,
    count,
    feature_layers,
    image_token,
    joined,
    norm_of,
    tower_config,
)
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import ActivationStep, Chain, LinearStep, MergeStep, ModelSpec, NormStep


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    vision, kernel = tower_config(config, "pixtral"), count(config, "spatial_merge_size", 2)
    states = feature_layers(config, -1, count(vision, "num_hidden_layers", 24))
    hidden, bias = count(vision, "hidden_size", 1024), bool(config.get("multimodal_projector_bias", False))
    chain = Chain(
        width=hidden,
        steps=(
            NormStep(name="norm", norm=norm_of(text.final_norm.eps, "rms")),
            MergeStep(patches=kernel**2, how="interleaved"),
            LinearStep(name="merge", width=hidden, bias=False),
            LinearStep(name="0", width=text.hidden, bias=bias),
            ActivationStep(activation=acts(config, "projector_hidden_act", "gelu")),
            LinearStep(name="1", width=text.hidden, bias=bias),
        ),
    )
    tower = pixtral(vision, chain, states, kernel, image_token(config, 10))
    return joined(config, "mistral3", text, tower, tie_default=True)


_P = "(model.|)multi_modal_projector."
RULES: tuple[WeightRule, ...] = (
    *PIXTRAL_RULES,
    *both(_P + "norm", "projector.norm"),
    *both(_P + "patch_merger.merging_layer", "projector.merge"),
    *both(_P + "linear_1", "projector.0"),
    *both(_P + "linear_2", "projector.1"),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="mistral")
FAMILY = Family(name="mistral3", model_types=("mistral3",), spec=spec, rules=RULES, parts=(TEXT,))
