"""Qwen2-VL and Qwen2.5-VL: patches of any grid turn by row and column, four become one feature; text is Qwen2's.

Positions in the decoder count frames, rows and columns. Qwen2.5-VL's tower attends within windows in most layers and
has gated feed-forwards. Releases before transformers 5 keep the text's keys at the top level.
"""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
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
from firstlight.engine.model.rules import Part, WeightRule, rule
from firstlight.engine.model.spec import ModelSpec, PatchTower

VISION_PREFIX = "(model.|)visual."


def _older(config: Config) -> PatchTower:
    """Qwen2-VL: LayerNorm, plain feed-forwards, every patch of a frame sees all of it."""
    hidden, kernel = count(config, "embed_dim", 1280), count(config, "spatial_merge_size", 2)
    heads = heads_of(config, hidden, count(config, "num_heads", 16), 4)
    out, norm, merged = count(config, "hidden_size", 3584), norm_of(1e-6), kernel**2
    intermediate = int(hidden * config.positive("mlp_ratio", config.get("mlp_ratio", 4)))
    one = layer(norm, heads, hidden, intermediate, acts(config, "hidden_act", "quick_gelu"))
    return _tower(
        config,
        hidden=hidden,
        layers=(one,) * count(config, "depth", 32),
        chain=two_layers(hidden, merged, hidden * merged, out, norm),
    )


def _newer(config: Config) -> PatchTower:
    """Qwen2.5-VL: RMSNorm, gated feed-forwards, windows except in a few layers."""
    hidden, kernel = count(config, "hidden_size", 3584), count(config, "spatial_merge_size", 2)
    heads = heads_of(config, hidden, count(config, "num_heads", 16), 4)
    norm, merged, depth = norm_of(1e-6, "rms"), kernel**2, count(config, "depth", 32)
    intermediate = count(config, "intermediate_size", 3420)
    one = layer(norm, heads, hidden, intermediate, acts(config, "hidden_act", "silu"), gated=True)
    patch = count(config, "patch_size", 14, "spatial_patch_size")
    window = count(config, "window_size", 112) // kernel // patch
    if window < 1:
        config.refuse("window_size", config.get("window_size"), f"at least a merged patch, {kernel * patch}")
    config.get("tokens_per_second")  # of videos
    return _tower(
        config,
        hidden=hidden,
        layers=(one,) * depth,
        chain=two_layers(hidden, merged, hidden * merged, count(config, "out_hidden_size", 3584), norm),
        window=window,
        whole_layers=tuple(int(index) for index in config.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def _tower(config: Config, **fields: Any) -> PatchTower:
    return PatchTower(
        inputs="flat",
        patch_size=count(config, "patch_size", 14, "spatial_patch_size"),
        channels=count(config, "in_channels", 3, "in_chans"),
        frames=count(config, "temporal_patch_size", 2),
        kernel=count(config, "spatial_merge_size", 2),
        weight_dims=5,
        rope=axial(config),
        mrope=True,
        image_token_id=0,
        **fields,
    )


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    kind, vision = str(config.need("model_type")), tower_config(config, "qwen2_vl", "qwen2_5_vl")
    tower = _older(vision) if kind == "qwen2_vl" else _newer(vision)
    tower = msgspec.structs.replace(tower, image_token_id=image_token(config, 151655))
    outer = config.sub("text_config") if "text_config" in config else config
    return joined(config, kind, with_sections(outer, text, (16, 24, 24)), tower)


_B = VISION_PREFIX + "blocks.{i}."
RULES: tuple[WeightRule, ...] = (
    rule(VISION_PREFIX + "patch_embed.proj.weight", "vision.patch_embed.weight"),
    *fused_qkv(_B + "attn.qkv", "vision.layers.{i}.mixer"),
    *named(
        _B,
        {
            "attn.proj": "mixer.o",
            "mlp.fc1": "ffn.up",
            "mlp.fc2": "ffn.down",
            "mlp.gate_proj": "ffn.gate",
            "mlp.up_proj": "ffn.up",
            "mlp.down_proj": "ffn.down",
            "norm1": "mixer_norm",
            "norm2": "ffn_norm",
        },
        "vision.layers.{i}.",
    ),
    *both(VISION_PREFIX + "merger.ln_q", "projector.norm"),
    *both(VISION_PREFIX + "merger.mlp.0", "projector.0"),
    *both(VISION_PREFIX + "merger.mlp.2", "projector.1"),
)
TEXT = Part(key="text_config", prefix="(model.language_model.|language_model.|)", default="qwen2", flat=True)
TYPES = ("qwen2_vl", "qwen2_5_vl")
FAMILY = Family(
    name="qwen2_vl",
    model_types=TYPES,
    spec=spec,
    rules=RULES,
    silent={name: {"num_key_value_heads": 8} for name in TYPES},
    parts=(TEXT,),
)
