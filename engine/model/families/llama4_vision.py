"""Llama 4 with pictures: tiles whose patches turn by column and row, a class token that does not, pixels shuffled."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.vision_common import (
    axial,
    both,
    count,
    heads_of,
    image_token,
    joined,
    kernel_of,
    layer,
    named,
    norm_of,
    square,
    text_alone,
    tower_config,
)
from firstlight.engine.model.rules import Part, WeightRule, rule
from firstlight.engine.model.spec import (
    ActivationStep,
    Chain,
    GridPositions,
    LinearStep,
    MergeStep,
    ModelSpec,
    PatchTower,
)


def _tower(config: Config, text_hidden: int, image_token_id: int) -> PatchTower:
    hidden, patch = count(config, "hidden_size", 768), square(config, "patch_size", 14)
    heads = heads_of(config, hidden, count(config, "num_attention_heads", 16), 4)
    kernel, norm = kernel_of(config, "pixel_shuffle_ratio", 0.5), norm_of(1e-5)
    intermediate, image = count(config, "intermediate_size", 5632), square(config, "image_size", 448)
    if intermediate != hidden * kernel**2:
        config.refuse("intermediate_size", intermediate, f"{hidden * kernel**2}, which shuffled pixels have")
    config.only("vision_feature_select_strategy", "default", default="default")
    config.only("multi_modal_projector_bias", False, default=False)
    for key in ("hidden_act", "norm_eps", "vision_feature_layer", "projector_dropout"):
        config.get(key)  # the released tower has GELU and 1e-5 whatever these say
    width, out = count(config, "projector_input_dim", 4096), count(config, "projector_output_dim", 4096)
    if count(config, "vision_output_dim", 7680) != out:
        config.refuse("vision_output_dim", config.get("vision_output_dim"), f"{out}, as projector_output_dim")
    chain = Chain(
        width=hidden,
        steps=(
            MergeStep(patches=kernel**2),
            LinearStep(name="fc1", width=width, bias=False),
            ActivationStep(activation="gelu"),
            LinearStep(name="fc2", width=out, bias=False),
            ActivationStep(activation="gelu"),
            LinearStep(name="out", width=text_hidden, bias=False),
        ),
    )
    return PatchTower(
        inputs="tiles",
        image_size=image,
        patch_size=patch,
        channels=count(config, "num_channels", 3),
        kernel=kernel,
        weight_dims=2,
        hidden=hidden,
        layers=(layer(norm, heads, hidden, intermediate, "gelu"),) * count(config, "num_hidden_layers", 34),
        class_token="last",
        positions=GridPositions(side=image // patch, how="exact"),
        pre_norm=norm,
        rope=axial(config, layout="pairs"),
        norm=norm,
        chain=chain,
        image_token_id=image_token_id,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    for key in ("boi_token_index", "eoi_token_index"):
        config.get(key)  # marks around pictures are tokens like others
    if "vision_config" not in config:  # the architecture's own values are not those of any release
        image_token(config, 200092)
        return text_alone(config, msgspec.structs.replace(text, family="llama4"))
    tower = _tower(tower_config(config, "llama4"), text.hidden, image_token(config, 200092))
    return joined(config, "llama4", text, tower)


_V, _L = "(model.|)vision_model.", "(model.|)vision_model.model.layers.{i}."
RULES: tuple[WeightRule, ...] = (
    rule(_V + "class_embedding", "vision.class_embed"),
    rule(_V + "positional_embedding_vlm", "vision.position_embed.weight"),
    *named(_V, {"patch_embedding.linear": "patch_embed", "layernorm_pre": "pre_norm", "layernorm_post": "norm"}),
    *named(
        _L,
        {
            "input_layernorm": "mixer_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "mixer.q",
            "self_attn.k_proj": "mixer.k",
            "self_attn.v_proj": "mixer.v",
            "self_attn.o_proj": "mixer.o",
            "mlp.fc1": "ffn.up",
            "mlp.fc2": "ffn.down",
        },
        "vision.layers.{i}.",
    ),
    *named(_V + "vision_adapter.mlp.", {"fc1": "fc1", "fc2": "fc2"}, "projector."),
    *both("(model.|)multi_modal_projector.linear_1", "projector.out"),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="llama4_text")
FAMILY = Family(name="llama4_vision", model_types=("llama4",), spec=spec, rules=RULES, parts=(TEXT,))
