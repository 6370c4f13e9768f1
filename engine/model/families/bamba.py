"""Bamba: Mamba 2 layers, some of attention with half of each head rotated, an MLP behind each."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    ENDS,
    decoder,
    gqa,
    head_dim,
    in_layers,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import MAMBA2_RULES, layer_kinds, mamba2
from firstlight.engine.model.spec import Mixer, ModelSpec


def spec(config: Config) -> ModelSpec:
    size, bias = head_dim(config), bool(config.get("attention_bias", False))
    config.only("partial_rotary_factor", 0.5, default=0.5)
    fields = config.get("rope_parameters") or {}
    rotated = size if "partial_rotary_factor" in {**fields, **config.raw} else size // 2
    attention = gqa(config, rope=rope(config, rotated, partial=1.0), qkv_bias=bias, output_bias=bias)
    indices = set(config.get("attn_layer_indices", ()))
    count, kinds = config.size("num_hidden_layers"), layer_kinds(config, "linear_attention", "full_attention")
    if kinds is not None:
        kinds = one_a_layer(config, "layer_types", kinds)
        indices = {index for index, kind in enumerate(kinds) if kind == "full_attention"}
    if not indices <= set(range(count)):
        config.refuse("attn_layer_indices", sorted(indices), f"numbers of the {count} layers")
    state, feed_forward = mamba2(config), mlp(config, bias=bool(config.get("mlp_bias", False)))

    def mixer(index: int) -> Mixer:
        return attention if index in indices else state

    config.get("z_loss_coefficient"), config.get("num_logits_to_keep")  # of training, and of how many logits to compute
    return decoder(config, "bamba", mixer, feed_forward, norm=rms(config, 1e-5))


FEED_FORWARD = in_layers({f"feed_forward.{part}_proj": f"ffn.{part}" for part in ("gate", "up", "down")})
RULES = (
    ENDS
    + ATTENTION
    + MAMBA2_RULES
    + FEED_FORWARD
    + in_layers({"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ffn_norm"})
)
FAMILY = Family(
    name="bamba", model_types=("bamba",), spec=spec, rules=RULES, silent={"bamba": {"num_key_value_heads": 8}}
)
