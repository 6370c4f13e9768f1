"""Falcon-H1: attention and Mamba 2 side by side in every layer, and a multiplier wherever a projection ends."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.bamba import FEED_FORWARD
from firstlight.engine.model.families.common import ATTENTION, ENDS, decoder, gqa, head_dim, in_layers, mlp, rms
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import MAMBA2_RULES, mamba2
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import Mamba2, ModelSpec, SideBySide


def state_space(config: Config) -> Mamba2:
    scales = tuple(float(scale) for scale in config.get("ssm_multipliers", [1.0] * 5))
    if len(scales) != 5:
        config.refuse("ssm_multipliers", list(scales), "five numbers")
    norm = None
    before = bool(config.get("mamba_norm_before_gate", True))
    if config.get("mamba_rms_norm", False):
        norm = "before" if before else "behind"
    output_bias = bool(config.get("projectors_bias", False))
    return mamba2(config, scales=scales, norm=norm, output_bias=output_bias)


def spec(config: Config) -> ModelSpec:
    bias, size = bool(config.get("attention_bias", False)), head_dim(config)
    keys = float(config.get("key_multiplier", 1.0))  # of the keys: the same as of the scores
    attention = gqa(config, scale=size**-0.5 * keys, qkv_bias=bias, output_bias=bias)
    mixer = SideBySide(
        attention=attention,
        state=state_space(config),
        enter=(float(config.get("attention_in_multiplier", 1.0)), float(config.get("ssm_in_multiplier", 1.0))),
        leave=(float(config.get("attention_out_multiplier", 1.0)), float(config.get("ssm_out_multiplier", 1.0))),
    )
    gate, down = (float(scale) for scale in config.get("mlp_multipliers", (1.0, 1.0)))
    feed_forward = mlp(config, bias=bool(config.get("mlp_bias", False)), gate_scale=gate, scale=down)
    config.get("num_logits_to_keep")  # of how many logits to compute
    return decoder(
        config,
        "falcon_h1",
        mixer,
        feed_forward,
        norm=rms(config, 1e-5),
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        logit_scale=float(config.get("lm_head_multiplier", 1.0)),
    )


def beside(rules: tuple[WeightRule, ...], name: str) -> tuple[WeightRule, ...]:
    """The rules of a mixer for one of two."""
    return tuple(
        msgspec.structs.replace(
            one, params=tuple(param.replace("}.mixer.", f"}}.mixer.{name}.") for param in one.params)
        )
        for one in rules
    )


RULES = (
    ENDS
    + beside(ATTENTION, "attention")
    + beside(MAMBA2_RULES, "state")
    + FEED_FORWARD
    + in_layers({"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ffn_norm"})
)
FAMILY = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    spec=spec,
    rules=RULES,
    silent={"falcon_h1": {"num_key_value_heads": 8}},
)
