"""Sigmoid-routed experts under grouped-query attention: dots1, EXAONE, Flint, Hunyuan 3, Kolibri, Solar, Trinity.

Each row of `KIN` is a model type.
"""

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
    layer_windows,
    mlp,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import (
    MIXTURE,
    fill_in,
    mixture,
    shared_expert,
    sigmoid_router,
    sparse_layers,
)
from firstlight.engine.model.rules import WeightRule, rule
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


KIN = {
    "afmoe": Kin(
        head_dim=128,
        window=1024,
        full=4,
        nope=True,
        sandwich=True,
        gate="own",
        dense=1,
        scale="route_scale",
        router={"float32": False, "normalize": True},
    ),
    "dots1": Kin(eps=1e-6, window=4096),
    "exaone_moe": Kin(window=4096, full=4, nope=True, dense=1),
    "flint": Kin(eps=1e-6, head_dim=128, window=513, nope=True, router={"correction_bias": False, "eps": 0.0}),
    "hy_v3": Kin(theta=11158840.0, head_dim=128, dense=1, scale="router_scaling_factor", router={"normalize": True}),
    "kolibri1": Kin(
        eps=1e-6,
        head_dim=128,
        window=513,
        full=5,
        nope=True,
        sandwich=True,
        normalize=False,
        router={"score_chosen": True, "eps": 0.0},
    ),
    "solar_open": Kin(theta=1000000.0, head_dim=128, qk_norm=False, output_bias=False),
}


def _windows(config: Config, kin: Kin, model_type: str) -> list[int | None]:
    count, window = config.size("num_hidden_layers"), config.stated("sliding_window", absent=kin.window)
    full = int(config.get("global_attn_every_n_layers", config.get("sliding_window_pattern", kin.full)))
    above = int(config.get("max_window_layers", 62))
    if "layer_types" in config:
        return layer_windows(config, window)
    if model_type == "dots1":
        return [window if index >= above else None for index in range(count)]
    if model_type == "flint":
        return [None if index < 2 or index % 4 == 1 or index == count - 1 else window for index in range(count)]
    return [window if full and (index + 1) % full else None for index in range(count)]


def _sparse(config: Config, kin: Kin) -> list[bool]:
    if "num_dense_layers" in config:
        return sparse_layers(config, kin.dense, "num_dense_layers")
    if kin is KIN["flint"]:
        dense, step = set(config.get("mlp_only_layers", [0, 1])), int(config.get("decoder_sparse_step", 1))
        count = config.size("num_hidden_layers")
        return [index not in dense and (index + 1) % step == 0 for index in range(count)]
    return sparse_layers(config, kin.dense)


def _shared(config: Config) -> MLP | None:
    if "shared_expert_intermediate_size" in config:
        return MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=activation(config))
    return shared_expert(config, config.size("moe_intermediate_size"), bias=bool(config.get("mlp_bias", False)))


def spec(config: Config) -> ModelSpec:
    fill_in(config)
    model_type = str(config.need("model_type"))
    kin, bias = KIN[model_type], bool(config.get("attention_bias", False))
    own = config.size("hidden_size") // config.size("num_attention_heads")
    size = int(config.stated("head_dim", absent=kin.head_dim) or own)
    windows, norm, positions = _windows(config, kin, model_type), rms(config, kin.eps), rope(config, size, kin.theta)
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
            sinks=model_type == "flint",
            gate=kin.gate,
        )

    fields = {"normalize": bool(config.get("norm_topk_prob", kin.normalize)), **kin.router}
    moe = mixture(config, sigmoid_router(config, kin.scale, **fields), shared=_shared(config))
    sparse = _sparse(config, kin)
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


def names(config: Config) -> tuple[WeightRule, ...]:
    """Norms are named for where they stand, which is not the same place in all of these."""
    behind_attention = "post_mixer_norm" if config.get("model_type") == "afmoe" else "ffn_norm"
    return in_layers({"post_attention_layernorm": behind_attention})


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
    + (
        rule(_L + "self_attn.(sinks|softmax_offset)", "layers.{i}.mixer.sinks"),
        rule(_L + "moe.router.expert_bias", "layers.{i}.ffn.router.correction_bias"),
    )
)
FAMILY = Family(name="sigmoid_kin", model_types=tuple(KIN), spec=spec, rules=RULES, left_out=names)
