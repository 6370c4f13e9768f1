"""Pixtral's tower, as Mistral 3 and LLaVA have it: pictures of their own sizes, patches that turn by row and column."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.vision_common import acts, axial, count, heads_of, layer, named, norm_of, square
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import Chain, PatchTower


def pixtral(config: Config, chain: Chain, states: tuple[int, ...], kernel: int, image_token_id: int) -> PatchTower:
    """The tower of `vision_config`; rows turn by every other frequency, columns by the others."""
    hidden, norm = count(config, "hidden_size", 1024), norm_of(1e-5, "rms")
    heads = heads_of(config, hidden, count(config, "num_attention_heads", 16), 4)
    if int(config.get("head_dim", hidden // heads)) != hidden // heads:
        config.unsupported("head_dim", config.get("head_dim"), f"{hidden // heads}: the width by the heads")
    config.get("image_size"), config.get("vocab_size")  # rotations know no largest size
    one = layer(
        norm,
        heads,
        hidden,
        count(config, "intermediate_size", 4096),
        acts(config, "hidden_act", "gelu"),
        gated=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )
    return PatchTower(
        inputs="sized",
        patch_size=square(config, "patch_size", 16),
        channels=count(config, "num_channels", 3),
        kernel=kernel,
        hidden=hidden,
        layers=(one,) * count(config, "num_hidden_layers", 24),
        embed_norm=norm,
        rope=axial(config, split=True),
        states=states,
        chain=chain,
        image_token_id=image_token_id,
    )


_V = "(model.|)vision_tower."
PIXTRAL_RULES: tuple[WeightRule, ...] = (
    *named(_V, {"patch_conv": "patch_embed", "ln_pre": "embed_norm"}),
    *named(
        _V + "transformer.layers.{i}.",
        {
            "attention_norm": "mixer_norm",
            "ffn_norm": "ffn_norm",
            "attention.q_proj": "mixer.q",
            "attention.k_proj": "mixer.k",
            "attention.v_proj": "mixer.v",
            "attention.o_proj": "mixer.o",
            "feed_forward.gate_proj": "ffn.gate",
            "feed_forward.up_proj": "ffn.up",
            "feed_forward.down_proj": "ffn.down",
        },
        "vision.layers.{i}.",
    ),
)
