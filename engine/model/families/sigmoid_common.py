"""Sigmoid-routed experts under grouped-query attention: what such architectures share. No family stands here."""

from collections.abc import Mapping
from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    PRE,
    QK_NORM,
    SANDWICH,
    activation,
    decoder,
    gqa,
    in_layers,
    mlp,
    rms,
    rope,
)
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, shared_expert, sigmoid_router
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, FeedForward, ModelSpec


class Kin(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture assumes where its config.json is silent, and what it never says there.

    `full`: of so many layers the last sees everything. `nope`: layers that see everything do not rotate. `dense`
    layers at the bottom have no experts. `scale` names the key of the factor on the weights; `router` are fields that
    no key names.
    """

    theta: float = 10000.0
    eps: float = 1e-5
    head_dim: int | None = None
    qk_norm: bool = True
    output_bias: bool = True
    window: int | None = None
    full: int = 0
    nope: bool = False
    sandwich: bool = False
    gate: str | None = None
    dense: int = 0
    scale: str = "routed_scaling_factor"
    normalize: bool = True
    router: Mapping[str, Any] = {}


def _shared(config: Config) -> MLP | None:
    if "shared_expert_intermediate_size" in config:
        return MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=activation(config))
    return shared_expert(config, config.size("moe_intermediate_size"), bias=bool(config.get("mlp_bias", False)))


def sigmoid_decoder(
    config: Config, model_type: str, kin: Kin, windows: list[int | None], sparse: list[bool], **fields: Any
) -> ModelSpec:
    """The decoder of such an architecture; `fields` are further ones of its attention."""
    bias = bool(config.get("attention_bias", False))
    own = config.size("hidden_size") // config.size("num_attention_heads")
    size = int(config.stated("head_dim", absent=kin.head_dim) or own)
    norm, positions = rms(config, kin.eps), rope(config, size, kin.theta)
    config.get("enable_moe_fp32_combine")  # how the vendor rounds
    config.get("intermediate_size")  # of dense layers, where there are any

    def attention(index: int) -> Attention:
        return gqa(
            config,
            head_dim=size,
            scale=size**-0.5,
            rope=None if kin.nope and windows[index] is None else positions,
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias and kin.output_bias,
            qk_norm=norm if kin.qk_norm else None,
            gate=kin.gate,
            **fields,
        )

    chooses = {"normalize": bool(config.get("norm_topk_prob", kin.normalize)), **kin.router}
    moe = mixture(config, sigmoid_router(config, kin.scale, **chooses), shared=_shared(config))
    dense: FeedForward = moe if all(sparse) else mlp(config, bias=bool(config.get("mlp_bias", False)))

    scale = config.size("hidden_size") ** 0.5 if config.get("mup_enabled", False) else 1.0
    norms = SANDWICH if kin.sandwich else PRE
    return decoder(
        config,
        model_type,
        attention,
        lambda i: moe if sparse[i] else dense,
        norm=norm,
        norms=norms,
        embed_scale=scale,
        scales_pictures=True,
    )


_L = "(model.|)layers.{i}."
RULES = (
    ENDS
    + ATTENTION
    + QK_NORM
    + DENSE
    + MIXTURE
    + in_layers(
        {
            "input_layernorm": "mixer_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "(post_self_attn_layernorm|post_attn_norm)": "post_mixer_norm",
            "(post_mlp_layernorm|post_ffn_norm)": "post_ffn_norm",
            "self_attn.gate_proj": "mixer.gate",
        }
    )
    + (rule(_L + "moe.router.expert_bias", "layers.{i}.ffn.router.correction_bias"),)
)
