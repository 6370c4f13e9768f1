"""Kimi Linear: delta attention with a decay a channel, latent attention without positions, sigmoid-routed experts."""

import importlib
from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import TRUNK, activation, decoder, experts, mlp, one_a_layer, rms
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import sparse_layers
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import MLA, MLP, FeedForward, GatedDelta, Mixer, ModelSpec, MoE, Norm, Router


def delta_attention(config: Config) -> GatedDelta:
    nested = config.sub("linear_attn_config")
    heads = int(nested.get("num_heads", config.get("linear_num_heads", 32)))
    dim = int(nested.get("head_dim", config.get("linear_head_dim", 128)))
    config.only("hidden_act", "silu", default="silu")  # of the convolution
    return GatedDelta(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        eps=rms(config, 1e-5).eps,
        conv=int(nested.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))),
        decay="channel",
        decay_rank=dim,
        decay_shape=(1, 1, heads, 1),
        gate_rank=dim,
        gate_activation="sigmoid",
    )


def latent_attention(config: Config) -> MLA:
    config.only("mla_use_nope", True, default=True)
    nope, shared = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    for key in ("qk_head_dim", "head_dim", "num_key_value_heads", "rope_theta", "rope_parameters"):
        config.get(key)  # these follow from others, or say nothing of a model without positions
    return MLA(
        num_heads=config.size("num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=shared,
        v_dim=config.size("v_head_dim"),
        scale=(nope + shared) ** -0.5,
        norm=Norm(eps=1e-6),  # fixed in the reference, whatever rms_norm_eps says
        bias=bool(config.get("attention_bias", False)),
    )


def mixture(config: Config, act: str, scale: float) -> MoE:
    """`scale`: of the routed sum, where the file is silent."""
    config.only("moe_layer_freq", 1, default=1)
    config.only("moe_router_activation_func", "sigmoid", default="sigmoid")
    config.get("use_grouped_topk")  # with one group it says the same either way
    width = config.size("moe_intermediate_size")
    return MoE(
        num_experts=config.size("num_experts", "num_local_experts"),
        intermediate=width,
        activation=act,
        router=Router(
            top_k=config.size("num_experts_per_token", "num_experts_per_tok"),
            scoring="sigmoid",
            normalize=bool(config.get("moe_renormalize", config.get("norm_topk_prob", True))),
            scale=float(config.get("routed_scaling_factor", scale)),
            correction_bias=True,
            num_groups=int(config.get("num_expert_group", config.get("n_group", 1))),
            topk_groups=int(config.get("topk_group", 1)),
            group_score="top2_sum",
            float32=True,
        ),
        shared=MLP(
            intermediate=width * int(config.get("num_shared_experts", config.get("n_shared_experts", 1))),
            activation=act,
        ),
    )


def full_layers(config: Config) -> set[int]:
    """Layers with latent attention, counted from 0; releases count them from 1."""
    count, types = config.size("num_hidden_layers"), config.get("layer_types")
    if types is not None:
        kinds = one_a_layer(config, "layer_types", types, "full_attention", "linear_attention")
        return {index for index, kind in enumerate(kinds) if kind == "full_attention"}
    nested = config.sub("linear_attn_config")
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or linear is None:
        return {index for index in range(count) if index and index % 4 == 0}
    if sorted((*full, *linear)) != list(range(1, count + 1)):
        nested.refuse("full_attn_layers", full, f"with kda_layers, each of the layers 1 to {count} once")
    return {index - 1 for index in full}


def spec(config: Config) -> ModelSpec:
    if (k3 := _k3(config)) is not None:
        whole: ModelSpec = k3.text(config)
        return whole
    delta, latent, full = delta_attention(config), latent_attention(config), full_layers(config)
    moe, sparse, plain = mixture(config, activation(config), 2.446), sparse_layers(config, 1), mlp(config)
    config.only("num_nextn_predict_layers", 0, default=0)

    def mixer(index: int) -> Mixer:
        return latent if index in full else delta

    def feed_forward(index: int) -> FeedForward:
        return moe if sparse[index] else plain

    reach = int(config.get("model_max_length", config.get("max_position_embeddings", 0)))
    return decoder(config, "kimi_linear", mixer, feed_forward, norm=rms(config, 1e-5), max_positions=reach)


def _k3(config: Config) -> Any:
    """The family built on this file, where the configuration is Kimi K3's text, which is called a Kimi Linear too."""
    home = "firstlight.engine.model.families.kimi_k3"
    return importlib.import_module(home) if "attn_res_block_size" in config else None


def k3_rules(config: Config) -> tuple[WeightRule, ...]:
    return tuple(k3.TEXT_RULES) if (k3 := _k3(config)) else ()


_A, _P = "(model.|)layers.{i}.self_attn.", "layers.{i}.mixer."
_G = "(|forget_gate.)"  # where transformers keeps what the decay is made of
DELTA_RULES = (
    *(rule(f"{_A}{part}_proj.weight", f"{_P}{part}.weight") for part in ("k", "v", "b", "g", "g_a", "g_b")),
    *(rule(f"{_A}{part}_conv1d.weight", f"{_P}conv.{part}.weight") for part in "qkv"),
    rule(_A + "conv1d.weight", *(f"{_P}conv.{part}.weight" for part in "qkv")),
    *(rule(f"{_A}{_G}{part}_proj.weight", f"{_P}{part}.weight") for part in ("f_a", "f_b")),
    rule(f"{_A}{_G}A_log", _P + "decay"),
    rule(f"{_A}{_G}dt_bias", _P + "dt_bias"),
    rule(_A + "o_norm.weight", _P + "norm.weight"),
)
_PARTS = ("gate", "up", "down")
_F, _D = "(model.|)layers.{i}.(block_sparse_moe|mlp).", "(model.|)layers.{i}.(mlp|block_sparse_moe)."
MIXTURE_RULES = (
    *(rule(f"{_D}{part}_proj.weight", f"layers.{{i}}.ffn.{part}.weight") for part in _PARTS),
    *(rule(f"{_F}shared_experts.{part}_proj.weight", f"layers.{{i}}.ffn.shared.{part}.weight") for part in _PARTS),
    rule(_F + "gate.e_score_correction_bias", "layers.{i}.ffn.router.correction_bias"),
    *experts("block_sparse_moe", "w1", "w3", "w2"),
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
)
RULES = TRUNK + MLA_RULES + DELTA_RULES + MIXTURE_RULES
FAMILY = Family(name="kimi_linear", model_types=("kimi_linear",), spec=spec, rules=RULES, left_out=k3_rules)
