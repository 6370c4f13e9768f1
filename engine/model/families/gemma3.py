"""Gemma 3 with pictures: SigLIP at one size, patches averaged to a fixed number of features, which see each other."""

from types import MappingProxyType

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.siglip import siglip, siglip_rules
from firstlight.engine.model.families.vision_common import both, count, image_token, joined, square, tower_config
from firstlight.engine.model.rules import Part, WeightRule, rule
from firstlight.engine.model.spec import (
    Attention,
    Chain,
    GridPositions,
    LayerSpec,
    LinearStep,
    MergeStep,
    ModelSpec,
    Norm,
    NormStep,
)

DEFAULTS = MappingProxyType(
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
    }
)


def _seeing(layer: LayerSpec) -> LayerSpec:
    """The tokens of one picture see each other, in every layer."""
    assert isinstance(layer.mixer, Attention)
    return msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, whole_pictures=True))


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    vision, tokens = tower_config(config, "siglip_vision_model"), count(config, "mm_tokens_per_image", 256)
    image, patch = square(vision, "image_size", 224), square(vision, "patch_size", DEFAULTS["patch_size"])
    side, kernel = image // patch, max(image // patch // int(tokens**0.5), 1)
    if (side // kernel) ** 2 != tokens or side % kernel:
        config.refuse("mm_tokens_per_image", tokens, f"a square number whose root divides {side} patches a side")
    for key in ("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"):
        config.get(key)  # marks around pictures are tokens like others
    hidden = count(vision, "hidden_size", DEFAULTS["hidden_size"])
    norm = Norm(eps=float(vision.get("layer_norm_eps", 1e-6)), offset=1.0)
    chain = Chain(
        width=hidden,
        steps=(
            MergeStep(patches=kernel**2, how="mean"),
            NormStep(name="norm", norm=norm),
            LinearStep(name="out", width=text.hidden, bias=False),
        ),
    )
    tower = siglip(
        vision,
        DEFAULTS,
        chain,
        inputs="tiles",
        image_size=image,
        kernel=kernel,
        positions=GridPositions(side=side, how="exact"),
        image_token_id=image_token(config, 262144),
    )
    whole = msgspec.structs.replace(text, layers=tuple(_seeing(layer) for layer in text.layers))
    return joined(config, "gemma3", whole, tower, tie_default=True)


_P = "(model.|)multi_modal_projector."
RULES: tuple[WeightRule, ...] = (
    *siglip_rules("(model.|)vision_tower.(vision_model.|)"),
    *both(_P + "mm_soft_emb_norm", "projector.norm"),
    rule(_P + "mm_input_projection_weight", "projector.out.weight", transpose=True),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="gemma3_text")
FAMILY = Family(name="gemma3", model_types=("gemma3",), spec=spec, rules=RULES, parts=(TEXT,))
