"""Jamba: Mamba layers with inner norms, a few of attention without positions, experts in every other layer."""

import math

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.bamba import FEED_FORWARD
from firstlight.engine.model.families.common import ATTENTION, ENDS, decoder, gqa, in_layers, mlp, rms
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.families.state_spaces import MAMBA_RULES
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import FeedForward, Mamba, Mixer, ModelSpec


def every(config: Config, what: str, period: int, offset: int) -> tuple[int, int]:
    """(period, offset) of the layers of a kind."""
    period, offset = int(config.get(f"{what}_layer_period", period)), int(config.get(f"{what}_layer_offset", offset))
    if not 0 <= offset < period:
        config.refuse(f"{what}_layer_offset", offset, f"below {what}_layer_period {period}")
    return period, offset


def spec(config: Config) -> ModelSpec:
    config.only("hidden_act", "silu", default="silu")
    for key in ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"):
        config.get(key)  # which implementation the reference takes, and of how many logits to compute
    hidden, rank = config.size("hidden_size"), config.get("mamba_dt_rank", "auto")
    state = Mamba(
        width=int(config.get("mamba_expand", 2)) * hidden,
        state_dim=int(config.get("mamba_d_state", 16)),
        rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
        conv=int(config.get("mamba_d_conv", 4)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        norm=rms(config),
    )
    attention, dense = gqa(config, rope=None), mlp(config)
    attends, is_sparse = every(config, "attn", 8, 4), every(config, "expert", 2, 1)
    count = int(config.get("num_experts", 16))
    moe = mixture(config, router(config, normalize=False), "intermediate_size") if count > 1 else dense

    def mixer(index: int) -> Mixer:
        return attention if index % attends[0] == attends[1] else state

    def feed_forward(index: int) -> FeedForward:
        return moe if index % is_sparse[0] == is_sparse[1] else dense

    return decoder(config, "jamba", mixer, feed_forward)


_L, _E = "(model.|)layers.{i}.feed_forward.", "layers.{i}.ffn.experts.{e}."
EXPERTS = (
    *(rule(f"{_L}experts.{{e}}.{part}_proj.weight", f"{_E}{part}.weight") for part in ("gate", "up", "down")),
    rule(_L + "experts.gate_up_proj", _E + "gate.weight", _E + "up.weight", stacked=True),
    rule(_L + "experts.down_proj", _E + "down.weight", stacked=True),
    rule(_L + "router.weight", "layers.{i}.ffn.router.weight"),
)
RULES = (
    ENDS
    + ATTENTION
    + MAMBA_RULES
    + FEED_FORWARD
    + EXPERTS
    + in_layers({"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ffn_norm"})
)
FAMILY = Family(
    name="jamba", model_types=("jamba",), spec=spec, rules=RULES, silent={"jamba": {"num_key_value_heads": 8}}
)
