"""GLM-4.1V and GLM-4.5V: a tower whose learned positions are stretched to each grid, a convolution that merges patches.

Text is GLM-4's, or with experts GLM-4.5's; positions in the decoder count frames, rows and columns.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.qwen2_vl import VISION_PREFIX
from firstlight.engine.model.families.vision_common import (
    acts,
    axial,
    both,
    count,
    fused_qkv,
    heads_of,
    image_token,
    joined,
    layer,
    named,
    norm_of,
    square,
    tower_config,
    with_sections,
)
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import (
    ActivationStep,
    Chain,
    GatedStep,
    GridPositions,
    LinearStep,
    MergeStep,
    ModelSpec,
    NormStep,
    PatchTower,
)


def _tower(config: Config, image_token_id: int) -> PatchTower:
    hidden, out = count(config, "hidden_size", 1536), count(config, "out_hidden_size", 4096)
    heads, kernel = heads_of(config, hidden, count(config, "num_heads", 12), 4), count(config, "spatial_merge_size", 2)
    norm = norm_of(config.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-5)), "rms")
    activation, patch = acts(config, "hidden_act", "silu"), square(config, "patch_size", 14)
    bias = bool(config.get("attention_bias", False))
    one = layer(norm, heads, hidden, out, activation, gated=True, qkv_bias=bias, output_bias=False, mlp_bias=False)
    chain = Chain(
        width=hidden,
        steps=(
            MergeStep(patches=kernel**2, how="interleaved"),
            LinearStep(name="downsample", width=out, kernel=kernel),
            LinearStep(name="proj", width=out, bias=False),
            NormStep(name="norm", norm=norm_of(1e-5)),
            ActivationStep(activation="gelu"),
            GatedStep(intermediate=count(config, "intermediate_size", 13696), activation=activation),
        ),
    )
    return PatchTower(
        inputs="flat",
        patch_size=patch,
        channels=count(config, "in_channels", 3),
        frames=count(config, "temporal_patch_size", 2),
        kernel=kernel,
        weight_dims=5,
        patch_bias=True,
        hidden=hidden,
        layers=(one,) * count(config, "depth", 24),
        embed_norm=norm,
        positions=GridPositions(side=square(config, "image_size", 336) // patch, how="cubic"),
        rope=axial(config),
        norm=norm,
        chain=chain,
        mrope=True,
        image_token_id=image_token_id,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    for key in ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"):
        config.get(key)  # marks around pictures are tokens like others
    tower = _tower(tower_config(config, "glm4v", "glm46v"), image_token(config, 151343))
    outer = config.sub("text_config") if "text_config" in config else config
    return joined(config, str(config.need("model_type")), with_sections(outer, text, (8, 12, 12)), tower)


RULES: tuple[WeightRule, ...] = (
    *named(
        VISION_PREFIX,
        {
            "patch_embed.proj": "patch_embed",
            "post_conv_layernorm": "embed_norm",
            "embeddings.position_embedding": "position_embed",
            "post_layernorm": "norm",
        },
    ),
    *fused_qkv(VISION_PREFIX + "blocks.{i}.attn.qkv", "vision.layers.{i}.mixer"),
    *named(
        VISION_PREFIX + "blocks.{i}.",
        {
            "attn.proj": "mixer.o",
            "mlp.gate_proj": "ffn.gate",
            "mlp.up_proj": "ffn.up",
            "mlp.down_proj": "ffn.down",
            "norm1": "mixer_norm",
            "norm2": "ffn_norm",
        },
        "vision.layers.{i}.",
    ),
    *both(VISION_PREFIX + "downsample", "projector.downsample"),
    *named(
        VISION_PREFIX + "merger.",
        {
            "proj": "proj",
            "post_projection_norm": "norm",
            "gate_proj": "gate",
            "up_proj": "up",
            "down_proj": "down",
        },
        "projector.",
    ),
)
TEXT = Part(key="text_config", prefix="(model.language_model.|language_model.|)", default="glm4v_text", flat=True)
FAMILY = Family(
    name="glm4v",
    model_types=("glm4v", "glm4v_moe", "glm46v"),
    spec=spec,
    rules=RULES,
    silent={"glm4v": {"num_key_value_heads": 2}},
    parts=(TEXT,),
)
