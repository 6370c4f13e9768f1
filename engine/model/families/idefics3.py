"""Idefics3 and SmolVLM: SigLIP over tiles of which any part may be picture, patches of a kernel side by side."""

from types import MappingProxyType

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.siglip import siglip, siglip_rules
from firstlight.engine.model.families.vision_common import both, count, image_token, joined, square, tower_config
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import Chain, GridPositions, LinearStep, MergeStep, ModelSpec

DEFAULTS = MappingProxyType(
    {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "patch_size": 32,
    }
)


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    vision, kernel = tower_config(config, "idefics3", "smolvlm"), count(config, "scale_factor", 2)
    vision.get("max_image_size"), vision.get("size")  # the processor's
    side = square(vision, "image_size", 224) // square(vision, "patch_size", DEFAULTS["patch_size"])
    chain = Chain(
        width=count(vision, "hidden_size", DEFAULTS["hidden_size"]),
        steps=(MergeStep(patches=kernel**2), LinearStep(name="0", width=text.hidden, bias=False)),
    )
    tower = siglip(
        vision,
        DEFAULTS,
        chain,
        inputs="masked",
        kernel=kernel,
        positions=GridPositions(side=side, how="nearest"),
        image_token_id=image_token(config, 128257),
    )
    return joined(config, str(config.need("model_type")), text, tower)


RULES: tuple[WeightRule, ...] = (
    *siglip_rules("(model.|)vision_model."),
    *both("(model.|)connector.modality_projection.proj", "projector.0"),
)
TEXT = Part(key="text_config", prefix="(model.text_model.|text_model.|)", default="llama")
FAMILY = Family(name="idefics3", model_types=("idefics3", "smolvlm"), spec=spec, rules=RULES, parts=(TEXT,))
