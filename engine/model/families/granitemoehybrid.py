"""Granite 4: Mamba 2 layers, some of attention without positions, multipliers, experts beside a shared MLP."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    TRUNK,
    activation,
    decoder,
    gqa,
    head_dim,
    one_a_layer,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.families.state_spaces import MAMBA2_RULES, layer_kinds, mamba2
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, FeedForward, Mixer, ModelSpec


def spec(config: Config) -> ModelSpec:
    bias, count = bool(config.get("attention_bias", False)), config.size("num_hidden_layers")
    rotates = config.only("position_embedding_type", "rope", "nope", None) == "rope"
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        config.get(key)  # there, but without effect where nothing is rotated
    attention = gqa(
        config,
        rope=rope(config, head_dim(config)) if rotates else None,
        scale=float(config.get("attention_multiplier", 1.0)),
        qkv_bias=bias,
        output_bias=bias,
    )
    shared = MLP(intermediate=config.size("shared_intermediate_size"), activation=activation(config))
    feed_forward: FeedForward = shared
    if int(config.get("num_local_experts", 0)):
        feed_forward = mixture(config, router(config, score_chosen=True), "intermediate_size", shared=shared)
    config.get("intermediate_size"), config.get("num_experts_per_tok")
    kinds = layer_kinds(config, "linear_attention", "full_attention")
    kinds = one_a_layer(config, "layer_types", kinds or ["linear_attention"] * count)
    state = mamba2(config)

    def mixer(index: int) -> Mixer:
        return attention if kinds[index] == "full_attention" else state

    return decoder(
        config,
        "granitemoehybrid",
        mixer,
        feed_forward,
        layer={"residual_scale": float(config.get("residual_multiplier", 1.0))},
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        scales_pictures=True,
        logit_scale=1.0 / config.positive("logits_scaling", config.get("logits_scaling", 1.0)),
    )


_S, _F = "(model.|)layers.{i}.shared_mlp.", "layers.{i}.ffn."
ALONE = (  # where there are no experts
    rule(_S + "input_linear.weight", _F + "gate.weight", _F + "up.weight"),
    rule(_S + "output_linear.weight", _F + "down.weight"),
)
RULES = TRUNK + ATTENTION + MAMBA2_RULES + MIXTURE
FAMILY = Family(
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    spec=spec,
    rules=RULES,
    silent={"granitemoehybrid": {"num_local_experts": 8, "rms_norm_eps": 1e-6}},
    left_out=lambda config: () if int(config.get("num_local_experts", 0)) else ALONE,
)
