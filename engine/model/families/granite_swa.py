"""Granite Swash, dense or with experts: windows, a sink a head, a rotary base a layer; HyperCLOVA X's own Granite."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    PRE,
    SANDWICH,
    TRUNK,
    activation,
    decoder,
    gqa,
    head_dim,
    in_layers,
    layer_windows,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, FeedForward, ModelSpec

WINDOWED, MIXED, CLOVA = "granite_swa", "granitemoe_swa", "hyperclovax"


def _windows(config: Config) -> list[int | None]:
    """Three of four layers have one where the file does not list kinds."""
    count = config.size("num_hidden_layers")
    if config.get("model_type") == CLOVA:
        return [None] * count
    window = config.stated("sliding_window", absent=128)
    return (
        layer_windows(config, window) if "layer_types" in config else [(i % 4 and window) or None for i in range(count)]
    )


def _bases(config: Config) -> list[float | None]:
    """The rotary base of each layer, 0 for none; None: that of all."""
    listed = config.get("layer_rope_theta")
    if listed is None:
        return [None] * config.size("num_hidden_layers")
    return [float(base) for base in one_a_layer(config, "layer_rope_theta", listed)]


def _feed_forward(config: Config) -> FeedForward:
    if config.get("model_type") != MIXED:
        return mlp(config, bias=bool(config.get("mlp_bias", False)))
    width = int(config.get("shared_intermediate_size", 0))
    shared = MLP(intermediate=width, activation=activation(config)) if width else None
    return mixture(config, router(config, score_chosen=True), "intermediate_size", shared=shared)


def spec(config: Config) -> ModelSpec:
    model_type, size = str(config.need("model_type")), head_dim(config)
    clova, bias = model_type == CLOVA, bool(config.get("attention_bias", False))
    positions, windows, bases = rope(config, size), _windows(config), _bases(config)

    def attention(index: int) -> Attention:
        base = bases[index]
        turned = positions if base is None else msgspec.structs.replace(positions, theta=base)
        return gqa(
            config,
            scale=float(config.get("attention_multiplier", size**-0.5 if clova else 1.0)),
            rope=None if base == 0 else turned,
            window=windows[index],
            sinks=not clova,
            qkv_bias=bias,
            output_bias=bias,
        )

    feed_forward, scaling = _feed_forward(config), config.positive("logits_scaling", config.get("logits_scaling", 1.0))
    return decoder(
        config,
        model_type,
        attention,
        feed_forward,
        norm=rms(config, 1e-5 if model_type == WINDOWED else 1e-6),
        norms=SANDWICH if clova and config.get("use_post_norm", True) else PRE,
        layer={"residual_scale": float(config.get("residual_multiplier", 1.0))},
        tie_default=model_type == WINDOWED,
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        scales_pictures=True,
        logit_scale=scaling if clova else 1.0 / scaling,  # HyperCLOVA X multiplies by the key of the same name
    )


RULES = (
    *TRUNK,
    *ATTENTION,
    *DENSE,
    *MIXTURE,
    *in_layers({"post_norm1": "post_mixer_norm", "post_norm2": "post_ffn_norm"}),
    rule("(model.|)layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks"),
)
FAMILY = Family(
    name="granite_swa",
    model_types=(WINDOWED, MIXED, CLOVA),
    spec=spec,
    rules=RULES,
    silent={WINDOWED: {"num_key_value_heads": 4}},
)
