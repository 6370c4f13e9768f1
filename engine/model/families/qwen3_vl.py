"""Qwen3-VL, dense and with experts, and Qwen3.5 with pictures: learned positions stretched to each grid, deep features.

What middle layers of the tower give is merged as well and added behind the decoder's first layers (DeepStack). Text is
Qwen3's, Qwen3-MoE's or Qwen3.5's, with frame, row and column taking turns over the frequencies.
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
    tower_config,
    two_layers,
    with_sections,
)
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import (
    ActivationStep,
    Chain,
    DeepFeatures,
    GridPositions,
    LinearStep,
    MergeStep,
    ModelSpec,
    NormStep,
    PatchTower,
)

SECTIONS = {"qwen3_5": (11, 11, 10), "qwen3_5_moe": (11, 11, 10)}


def _tower(config: Config, deep_default: tuple[int, ...], image_token_id: int) -> PatchTower:
    hidden, kernel = count(config, "hidden_size", 1152), count(config, "spatial_merge_size", 2)
    heads, depth = heads_of(config, hidden, count(config, "num_heads", 16), 4), count(config, "depth", 27)
    out, norm, merged = count(config, "out_hidden_size", 3584), norm_of(1e-6), hidden * kernel**2
    intermediate = count(config, "intermediate_size", 4304)
    one = layer(norm, heads, hidden, intermediate, acts(config, "hidden_act", "gelu_pytorch_tanh"))
    positions = count(config, "num_position_embeddings", 2304)
    side = int(positions**0.5)
    if side * side != positions:
        config.refuse("num_position_embeddings", positions, "a square number")
    indexes = tuple(int(index) for index in config.stated("deepstack_visual_indexes", absent=deep_default) or ())
    if any(not 0 <= index < depth for index in indexes) or len(set(indexes)) < len(indexes):
        config.refuse("deepstack_visual_indexes", list(indexes), f"layers of 0 to {depth - 1}, each once")
    deep = Chain(
        width=hidden,
        steps=(
            MergeStep(patches=kernel**2),
            NormStep(name="norm", norm=norm),
            LinearStep(name="0", width=merged),
            ActivationStep(activation="gelu"),
            LinearStep(name="1", width=out),
        ),
    )
    return PatchTower(
        inputs="flat",
        patch_size=count(config, "patch_size", 16),
        channels=count(config, "in_channels", 3),
        frames=count(config, "temporal_patch_size", 2),
        kernel=kernel,
        weight_dims=5,
        patch_bias=True,
        hidden=hidden,
        layers=(one,) * depth,
        positions=GridPositions(side=side, how="linear", centres=False),
        rope=axial(config),
        chain=two_layers(hidden, kernel**2, merged, out, norm),
        deep=tuple(DeepFeatures(layer=index, chain=deep) for index in indexes),
        mrope=True,
        image_token_id=image_token_id,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    kind = str(config.need("model_type"))
    vision = tower_config(config, "qwen3_vl", "qwen3_5")
    tower = _tower(vision, () if kind in SECTIONS else (8, 16, 24), image_token(config, 151655))
    sections = SECTIONS.get(kind, (24, 20, 20))
    return joined(config, kind, with_sections(config.sub("text_config"), text, sections, interleaved=True), tower)


_B = VISION_PREFIX + "blocks.{i}."
RULES: tuple[WeightRule, ...] = (
    *both(VISION_PREFIX + "patch_embed.proj", "vision.patch_embed"),
    *both(VISION_PREFIX + "pos_embed", "vision.position_embed"),
    *fused_qkv(_B + "attn.qkv", "vision.layers.{i}.mixer"),
    *named(
        _B,
        {
            "attn.proj": "mixer.o",
            "mlp.linear_fc1": "ffn.up",
            "mlp.linear_fc2": "ffn.down",
            "norm1": "mixer_norm",
            "norm2": "ffn_norm",
        },
        "vision.layers.{i}.",
    ),
    *(
        one
        for theirs, ours in (("merger", "projector."), ("deepstack_merger_list.{i}", "projector.deep.{i}."))
        for one in named(f"{VISION_PREFIX}{theirs}.", {"norm": "norm", "linear_fc1": "0", "linear_fc2": "1"}, ours)
    ),
)
TEXT = Part(key="text_config", prefix="(model.language_model.|language_model.|)", default="qwen3")
FAMILY = Family(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    spec=spec,
    rules=RULES,
    parts=(TEXT,),
)
