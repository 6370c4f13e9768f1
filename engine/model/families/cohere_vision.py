"""Aya Vision and Command A Vision: SigLIP over tiles, rows and columns folded into channels, a gated projector."""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.siglip import siglip, siglip_rules
from firstlight.engine.model.families.vision_common import (
    both,
    count,
    feature_layers,
    image_token,
    joined,
    norm_of,
    square,
    tower_config,
)
from firstlight.engine.model.rules import Part, WeightRule, ignored, rule
from firstlight.engine.model.spec import Chain, GatedStep, GridPositions, MergeStep, ModelSpec, NormStep

AYA = "aya_vision"
SIZES = {
    AYA: {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 14,
        "patch_size": 14,
    },
    "cohere2_vision": {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 27,
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    model_type, vision = str(config.need("model_type")), tower_config(config, "siglip_vision_model")
    is_aya, sizes, kernel = model_type == AYA, SIZES[model_type], count(config, "downsample_factor", 2)
    image, patch = (
        square(vision, "image_size", 364 if is_aya else 512),
        square(vision, "patch_size", sizes["patch_size"]),
    )
    if image // patch % kernel:
        config.refuse("downsample_factor", kernel, f"a divisor of {image // patch} patches a side")
    wide = count(config, "alignment_intermediate_size", text.hidden if is_aya else 36864)
    hidden, steps = count(vision, "hidden_size", sizes["hidden_size"]), list[Any]([MergeStep(patches=kernel**2)])
    fields: dict[str, Any] = {}
    if is_aya:
        config.only("vision_feature_select_strategy", "full", default="full")
        eps = config.positive("adapter_layer_norm_eps", config.get("adapter_layer_norm_eps", 1e-6))
        steps.append(NormStep(name="norm", norm=norm_of(eps)))
        fields["states"] = feature_layers(config, -1, count(vision, "num_hidden_layers", sizes["num_hidden_layers"]))
    steps.append(GatedStep(intermediate=wide // 2, activation="silu", width=text.hidden, bias=True))
    tower = siglip(
        vision,
        sizes,
        Chain(width=hidden, steps=tuple(steps)),
        inputs="tiles",
        image_size=image,
        kernel=kernel,
        positions=GridPositions(side=image // patch, how="exact"),
        image_token_id=image_token(config, 255036),
        **fields,
    )
    tower = msgspec.structs.replace(tower, norm=None) if is_aya else tower  # a state is taken before the last norm
    return joined(config, model_type, text, tower, tie_default=True)


_V, _P = "(model.|)vision_tower.(vision_model.|)", "(model.|)multi_modal_projector."
RULES: tuple[WeightRule, ...] = (
    *siglip_rules(_V),
    *both(_P + "layernorm", "projector.norm"),
    *(rule(f"{_P}linear_1.{kind}", f"projector.up.{kind}", f"projector.gate.{kind}") for kind in ("weight", "bias")),
    *both(_P + "linear_2", "projector.down"),
)


def unused(config: Config) -> tuple[WeightRule, ...]:
    """What stands behind the state that is taken."""
    return (ignored(_V + "post_layernorm.{*}", "behind the chosen state"),) if config.get("model_type") == AYA else ()


TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="cohere2")
FAMILY = Family(name="cohere_vision", model_types=tuple(SIZES), spec=spec, rules=RULES, parts=(TEXT,), left_out=unused)
