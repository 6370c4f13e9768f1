"""LLaVA: a CLIP, SigLIP or Pixtral tower, a two-layer projector, and any decoder family of this engine for the text."""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.pixtral import PIXTRAL_RULES, pixtral
from firstlight.engine.model.families.vision_common import (
    CLIP_LAYER,
    both,
    count,
    feature_layers,
    image_token,
    joined,
    layer,
    named,
    plain_head,
    tied,
    tower_config,
)
from firstlight.engine.model.rules import Part, WeightRule, ignored, rule
from firstlight.engine.model.spec import (
    ActivationStep,
    Chain,
    LinearStep,
    ModelSpec,
    Norm,
    Projector,
    VisionSpec,
)


def _tower(config: Config) -> dict[str, Any]:
    """The encoder of `vision_config` as fields of `VisionSpec`."""
    kind = config.only("model_type", "clip_vision_model", "siglip_vision_model", default="clip_vision_model")
    clip = kind == "clip_vision_model"
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm = Norm(kind="layer", eps=float(config.get("layer_norm_eps", 1e-5 if clip else 1e-6)), bias=True)
    act = activation(config, default="quick_gelu" if clip else "gelu_pytorch_tanh")
    one = layer(norm, heads, hidden, config.size("intermediate_size"), act)
    config.get("vocab_size"), config.get("vision_use_head")
    return {
        "image_size": config.size("image_size"),
        "patch_size": config.size("patch_size"),
        "channels": int(config.get("num_channels", 3)),
        "hidden": hidden,
        "layers": (one,) * config.size("num_hidden_layers"),
        "patch_bias": not clip,
        "class_token": clip,
        "pre_norm": norm if clip else None,
        "post_norm": norm,
    }


def _ragged(config: Config, text: ModelSpec, states: tuple[int, ...], bias: bool) -> ModelSpec:
    """Pixtral's tower in front of LLaVA's projector."""
    config.only("vision_feature_select_strategy", "full", default="default")
    vision = config.sub("vision_config")
    chain = Chain(
        width=count(vision, "hidden_size", 1024) * len(states),
        steps=(
            LinearStep(name="0", width=text.hidden, bias=bias),
            ActivationStep(activation=activation(config, "projector_hidden_act", "gelu")),
            LinearStep(name="1", width=text.hidden, bias=bias),
        ),
    )
    return joined(config, "llava", text, pixtral(vision, chain, states, 1, image_token(config)))


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    vision = tower_config(config, "clip_vision_model", "siglip_vision_model", "pixtral")
    layers = count(vision, "num_hidden_layers", 24)
    features = feature_layers(config, -2, layers, several=True)
    bias = bool(config.stated("multimodal_projector_bias", absent=True))
    if vision.get("model_type") == "pixtral":
        return _ragged(config, text, features, bias)
    tower = _tower(vision)
    whole = VisionSpec(
        **tower,
        projector=Projector(
            widths=(int(tower["hidden"]) * len(features), text.hidden, text.hidden),
            activation=activation(config, "projector_hidden_act", "gelu"),
            bias=bias,
        ),
        image_token_id=image_token(config),
        feature_layers=features,
        drop_first=config.only("vision_feature_select_strategy", "default", "full", default="default") == "default",
    )
    return msgspec.structs.replace(plain_head(config, text), family="llava", vision=whole, tied_head=tied(config, text))


_V = "(model.|)vision_tower.(vision_model.|)"
RULES: tuple[WeightRule, ...] = (
    *PIXTRAL_RULES,
    rule(_V + "embeddings.class_embedding", "vision.class_embed"),
    rule(_V + "embeddings.position_embedding.weight", "vision.position_embed.weight"),
    ignored(_V + "embeddings.position_ids", "positions count from zero"),
    ignored(_V + "head.{*}", "pooling head, not used for features"),
    *both(_V + "embeddings.patch_embedding", "vision.patch_embed"),
    *both(_V + "(pre_layrnorm|pre_layernorm)", "vision.pre_norm"),
    *both(_V + "post_layernorm", "vision.post_norm"),
    *named(_V + "encoder.layers.{i}.", CLIP_LAYER, "vision.layers.{i}."),
    *both("(model.|)multi_modal_projector.linear_1", "projector.0"),
    *both("(model.|)multi_modal_projector.linear_2", "projector.1"),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="llama")
FAMILY = Family(name="llava", model_types=("llava",), spec=spec, rules=RULES, parts=(TEXT,))
