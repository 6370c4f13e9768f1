"""InternVL 2.5 to 3.5 as transformers has them: InternViT over tiles, rows and columns folded into channels."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.vision_common import (
    acts,
    both,
    count,
    feature_layers,
    heads_of,
    image_token,
    joined,
    kernel_of,
    layer,
    named,
    norm_of,
    square,
    tower_config,
)
from firstlight.engine.model.rules import Part, WeightRule, ignored, rule
from firstlight.engine.model.spec import (
    ActivationStep,
    Chain,
    GridPositions,
    LinearStep,
    MergeStep,
    ModelSpec,
    NormStep,
    PatchTower,
)


def _tower(config: Config, chain: Chain, state: int, kernel: int, image_token_id: int) -> PatchTower:
    hidden, patch = count(config, "hidden_size", 1024), square(config, "patch_size", 14)
    heads = heads_of(config, hidden, count(config, "num_attention_heads", 16))
    eps = config.positive("layer_norm_eps", config.get("layer_norm_eps", 1e-6))
    kind = config.only("norm_type", "layer_norm", "rms_norm", default="layer_norm")
    norm = norm_of(eps, "layer" if kind == "layer_norm" else "rms")
    one = layer(
        norm,
        heads,
        hidden,
        count(config, "intermediate_size", 4096),
        acts(config, "hidden_act", "gelu"),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=norm_of(1e-6, "rms") if config.get("use_qk_norm", False) else None,
    )
    for key in ("use_mask_token", "hidden_dropout_prob", "projection_dropout", "layer_scale_init_value"):
        config.get(key)  # of training
    pools = bool(config.get("use_mean_pooling", True))  # and so does without a norm
    is_last = state == -1 and not pools
    side = square(config, "image_size", 448) // patch
    positions = GridPositions(side=side, how="cubic") if config.get("use_absolute_position_embeddings", True) else None
    return PatchTower(
        inputs="tiles",
        patch_size=patch,
        channels=count(config, "num_channels", 3),
        kernel=kernel,
        patch_bias=True,
        batched=True,
        hidden=hidden,
        layers=(one,) * count(config, "num_hidden_layers", 24),
        layer_scale=True,
        class_token="first",
        positions=positions,
        norm=norm_of(eps) if is_last else None,
        states=(state,),
        chain=chain,
        image_token_id=image_token_id,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    config.only("vision_feature_select_strategy", "default", default="default")
    kernel, vision = kernel_of(config, "downsample_ratio", 0.5), tower_config(config, "internvl")
    (state,) = feature_layers(config, -1, count(vision, "num_hidden_layers", 24))
    hidden = count(vision, "hidden_size", 1024)
    chain = Chain(
        width=hidden,
        steps=(
            MergeStep(patches=kernel**2),
            NormStep(name="norm", norm=norm_of(1e-5)),
            LinearStep(name="0", width=text.hidden),
            ActivationStep(activation=acts(config, "projector_hidden_act", "gelu")),
            LinearStep(name="1", width=text.hidden),
        ),
    )
    tower = _tower(vision, chain, state, kernel, image_token(config, 151667))
    return joined(config, "internvl", text, tower, tie_default=True)


_V, _L = "(model.|)vision_tower.", "(model.|)vision_tower.encoder.layer.{i}."
RULES: tuple[WeightRule, ...] = (
    rule(_V + "embeddings.cls_token", "vision.class_embed"),
    rule(_V + "embeddings.position_embeddings", "vision.position_embed.weight"),
    ignored(_V + "embeddings.mask_token", "stands for hidden patches in training"),
    *named(_V, {"embeddings.patch_embeddings.projection": "patch_embed", "layernorm": "norm"}),
    rule(_L + "lambda_1", "vision.layers.{i}.mixer_scale"),
    rule(_L + "lambda_2", "vision.layers.{i}.ffn_scale"),
    *named(
        _L,
        {
            "layernorm_before": "mixer_norm",
            "layernorm_after": "ffn_norm",
            "attention.q_proj": "mixer.q",
            "attention.k_proj": "mixer.k",
            "attention.v_proj": "mixer.v",
            "attention.q_norm": "mixer.q_norm",
            "attention.k_norm": "mixer.k_norm",
            "attention.projection_layer": "mixer.o",
            "mlp.fc1": "ffn.up",
            "mlp.fc2": "ffn.down",
        },
        "vision.layers.{i}.",
    ),
    *both("(model.|)multi_modal_projector.layer_norm", "projector.norm"),
    *both("(model.|)multi_modal_projector.linear_1", "projector.0"),
    *both("(model.|)multi_modal_projector.linear_2", "projector.1"),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="qwen2")
FAMILY = Family(name="internvl", model_types=("internvl",), spec=spec, rules=RULES, parts=(TEXT,))
