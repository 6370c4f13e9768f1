"""MiniMax-M3: a CLIP-like tower whose patches turn by frame, row and column; four projected patches become a feature.

Releases describe the text under `text_config`; copies of its keys alone (`minimax_m3`) are read too.
"""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.vision_common import (
    CLIP_LAYER,
    acts,
    axial,
    count,
    heads_of,
    image_token,
    joined,
    layer,
    named,
    norm_of,
    square,
    text_alone,
    tower_config,
)
from firstlight.engine.model.rules import Part
from firstlight.engine.model.spec import ActivationStep, Chain, LinearStep, MergeStep, ModelSpec, PatchTower

IMAGE = 200025


def _tower(config: Config, projected: int, text_hidden: int, image_token_id: int) -> PatchTower:
    hidden, kernel = count(config, "hidden_size", 1280), count(config, "spatial_merge_size", 2)
    heads = heads_of(config, hidden, count(config, "num_attention_heads", 16), 2)
    if hidden // heads < 6:
        config.refuse("num_attention_heads", heads, "heads of at least 6 dims, two for each axis")
    norm = norm_of(config.positive("layer_norm_eps", config.get("layer_norm_eps", 1e-5)))
    act = acts(config, "hidden_act", "gelu")
    one = layer(norm, heads, hidden, count(config, "intermediate_size", 5120), act)
    config.get("image_size")  # of the largest pictures; any size is taken
    steps = (
        LinearStep(name="0", width=projected),
        ActivationStep(activation="gelu"),
        LinearStep(name="1", width=text_hidden),
        MergeStep(patches=kernel**2),
        LinearStep(name="2", width=projected),
        ActivationStep(activation="gelu"),
        LinearStep(name="3", width=text_hidden),
    )
    return PatchTower(
        inputs="flat",
        patch_size=square(config, "patch_size", 14),
        channels=count(config, "num_channels", 3),
        frames=count(config, "temporal_patch_size", 2),
        kernel=kernel,
        weight_dims=5,
        hidden=hidden,
        layers=(one,) * count(config, "num_hidden_layers", 32),
        pre_norm=norm,
        rope=msgspec.structs.replace(axial(config), frames=True),
        chain=Chain(width=hidden, steps=steps),
        image_token_id=image_token_id,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    if "vision_config" not in config:
        image_token(config, IMAGE)
        return text_alone(config, text)
    projected = count(config, "projector_hidden_size", 6144)
    tower = _tower(tower_config(config, "minimax_m3_vl"), projected, text.hidden, image_token(config, IMAGE))
    return joined(config, "minimax_m3_vl", text, tower)


_V = "(model.|)vision_tower.(vision_model.|)"
RULES = (
    *named(_V, {"(embeddings.patch_embedding|embeddings.proj)": "patch_embed", "pre_layrnorm": "pre_norm"}),
    *named(
        _V + "(encoder.|)layers.{i}.",
        CLIP_LAYER,
        "vision.layers.{i}.",
    ),
    *named("(model.|)multi_modal_projector.", {"linear_1": "0", "linear_2": "1"}, "projector."),
    *named("(model.multi_modal_projector.merge_|patch_merge_mlp.)", {"linear_1": "2", "linear_2": "3"}, "projector."),
)
TEXT = Part(
    key="text_config",
    prefix="(language_model.|model.language_model.|)",
    default="minimax_m3_vl_text",
    flat=True,
)
TYPES = ("minimax_m3_vl", "minimax_m3")
FAMILY = Family(
    name="minimax_m3_vl",
    model_types=TYPES,
    spec=spec,
    rules=RULES,
    silent={name: {"num_key_value_heads": 4} for name in TYPES},
    parts=(TEXT,),
)
