"""Qwen3-Next: gated delta attention, every fourth layer gated softmax attention; norms around zero; many experts."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    QK_NORM,
    TRUNK,
    activation,
    decoder,
    experts,
    gqa,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import ignored, rule
from firstlight.engine.model.spec import (
    MLP,
    Attention,
    FeedForward,
    GatedDelta,
    Mixer,
    ModelSpec,
    MoE,
    Norm,
    Rope,
    Router,
)


def norm(config: Config) -> Norm:
    """Weights are stored as their distance from one."""
    return msgspec.structs.replace(rms(config), offset=1.0)


def positions(config: Config, dim: int) -> Rope:
    """A quarter of each head is rotated where the file does not say how much."""
    return rope(config, dim, partial=0.25)


def attention(config: Config) -> Attention:
    """Softmax attention whose output is gated; the gate stands behind the query of each head."""
    config.only("attn_output_gate", True, default=True)
    config.only("use_sliding_window", False, default=False)
    size, bias = int(config.get("head_dim", 256)), bool(config.get("attention_bias", False))
    return gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=positions(config, size),
        qk_norm=norm(config),
        qkv_bias=bias,
        output_bias=bias,
        gate="query",
    )


def delta_attention(config: Config, fused: bool) -> GatedDelta:
    config.only("hidden_act", "silu", default="silu")  # of the convolution and the gate
    key_heads, heads = int(config.get("linear_num_key_heads", 16)), int(config.get("linear_num_value_heads", 32))
    if heads % key_heads:
        config.refuse("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads {key_heads}")
    return GatedDelta(
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=int(config.get("linear_key_head_dim", 128)),
        value_dim=int(config.get("linear_value_head_dim", 128)),
        eps=rms(config).eps,
        conv=int(config.get("linear_conv_kernel_dim", 4)),
        fused=fused,
    )


def full_layers(config: Config) -> set[int]:
    """Layers with softmax attention."""
    count, types = config.size("num_hidden_layers"), config.get("layer_types")
    interval = int(config.get("full_attention_interval", 4))
    if types is None:
        return {index for index in range(count) if not (index + 1) % interval}
    kinds = one_a_layer(config, "layer_types", types, "full_attention", "linear_attention")
    return {index for index, kind in enumerate(kinds) if kind == "full_attention"}


def mixture(config: Config) -> MoE:
    act = activation(config)
    return MoE(
        num_experts=config.size("num_experts", "num_local_experts"),
        intermediate=config.size("moe_intermediate_size"),
        activation=act,
        router=Router(top_k=config.size("num_experts_per_tok"), normalize=bool(config.get("norm_topk_prob", True))),
        shared=MLP(intermediate=config.size("shared_expert_intermediate_size"), activation=act),
        shared_gate=True,
    )


def spec(config: Config) -> ModelSpec:
    softmax, delta, full = attention(config), delta_attention(config, fused=True), full_layers(config)
    step, dense_layers = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers", []))
    dense = mlp(config)
    moe = mixture(config) if int(config.get("num_experts", 512)) else None

    def mixer(index: int) -> Mixer:
        return softmax if index in full else delta

    def feed_forward(index: int) -> FeedForward:
        return dense if moe is None or index in dense_layers or (index + 1) % step else moe

    return decoder(config, "qwen3_next", mixer, feed_forward, norm=norm(config))


_A, _P = "(model.|)layers.{i}.linear_attn.", "layers.{i}.mixer."
DELTA_RULES = (
    rule(_A + "in_proj_qkvz.weight", _P + "qkvg.weight"),
    rule(_A + "in_proj_ba.weight", _P + "bf.weight"),
    rule(_A + "in_proj_qkv.weight", *(f"{_P}{part}.weight" for part in "qkv")),
    rule(_A + "in_proj_z.weight", _P + "g.weight"),
    rule(_A + "in_proj_b.weight", _P + "b.weight"),
    rule(_A + "in_proj_a.weight", _P + "f.weight"),
    rule(_A + "conv1d.weight", *(f"{_P}conv.{part}.weight" for part in "qkv")),
    rule(_A + "A_log", _P + "decay"),
    rule(_A + "dt_bias", _P + "dt_bias"),
    rule(_A + "norm.weight", _P + "norm.weight"),
    rule(_A + "out_proj.weight", _P + "o.weight"),
)
_F, _E = "(model.|)layers.{i}.mlp.", "layers.{i}.ffn."
SHARED_RULES = (
    *(rule(f"{_F}shared_expert.{part}_proj.weight", f"{_E}shared.{part}.weight") for part in ("gate", "up", "down")),
    rule(_F + "shared_expert_gate.weight", _E + "shared_gate.weight"),
)
RULES = (
    TRUNK
    + ATTENTION
    + QK_NORM
    + DELTA_RULES
    + DENSE
    + SHARED_RULES
    + experts("mlp", "gate_proj", "up_proj", "down_proj")
    + (ignored("mtp.{*}", "multi-token-prediction layer, not used for inference"),)
)
FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    spec=spec,
    rules=RULES,
    silent={"qwen3_next": {"num_key_value_heads": 2}},
)
