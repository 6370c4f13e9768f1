"""SigLIP's tower where it is one of many: Gemma 3 (one size), Idefics3 and SmolVLM (any part of a tile is picture)."""

from collections.abc import Mapping
from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.vision_common import (
    CLIP_LAYER,
    acts,
    count,
    heads_of,
    layer,
    named,
    norm_of,
    square,
)
from firstlight.engine.model.rules import WeightRule, ignored
from firstlight.engine.model.spec import Chain, PatchTower


def siglip(config: Config, defaults: Mapping[str, int], chain: Chain, **fields: Any) -> PatchTower:
    """The tower of `vision_config`; `defaults` are its sizes where the file is silent."""
    hidden = count(config, "hidden_size", defaults["hidden_size"])
    heads = heads_of(config, hidden, count(config, "num_attention_heads", defaults["num_attention_heads"]))
    norm = norm_of(config.positive("layer_norm_eps", config.get("layer_norm_eps", 1e-6)))
    intermediate = count(config, "intermediate_size", defaults["intermediate_size"])
    one = layer(norm, heads, hidden, intermediate, acts(config, "hidden_act", "gelu_pytorch_tanh"))
    config.get("vocab_size"), config.get("vision_use_head"), config.get("use_base_siglip")
    return PatchTower(
        patch_size=square(config, "patch_size", defaults["patch_size"]),
        channels=count(config, "num_channels", 3),
        patch_bias=True,
        hidden=hidden,
        layers=(one,) * count(config, "num_hidden_layers", defaults["num_hidden_layers"]),
        norm=norm,
        chain=chain,
        **fields,
    )


def siglip_rules(prefix: str) -> tuple[WeightRule, ...]:
    """The names below the tower's prefix."""
    return (
        *named(
            prefix,
            {
                "embeddings.patch_embedding": "patch_embed",
                "embeddings.position_embedding": "position_embed",
                "post_layernorm": "norm",
            },
        ),
        ignored(prefix + "embeddings.position_ids", "positions count from zero"),
        ignored(prefix + "head.{*}", "pooling head, not used for features"),
        *named(
            prefix + "encoder.layers.{i}.",
            CLIP_LAYER,
            "vision.layers.{i}.",
        ),
    )
