"""Ling 3: Kimi Linear's delta attention with a bounded decay, latent attention with positions and a gate a head."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    DENSE,
    TRUNK,
    activation,
    decoder,
    in_layers,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.deepseek_v3 import score_scale
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.kimi_linear import DELTA_RULES
from firstlight.engine.model.families.mixtures import (
    MIXTURE,
    mixture,
    shared_expert,
    sigmoid_router,
    sparse_layers,
)
from firstlight.engine.model.families.state_spaces import layer_kinds
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import MLA, FeedForward, GatedDelta, Mixer, ModelSpec, Norm


def delta_attention(config: Config) -> GatedDelta:
    config.only("hidden_act", "silu", default="silu")  # of the convolution
    heads = int(config.get("linear_num_heads", config.size("num_attention_heads")))
    dim = int(config.get("linear_head_dim", config.get("head_dim", 128)))
    bounded, bound = bool(config.get("kda_safe_gate", True)), float(config.get("kda_lower_bound", -5.0))
    if bounded and not bound < 0:
        config.refuse("kda_lower_bound", bound, "a number below zero")
    return GatedDelta(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        eps=rms(config).eps,
        conv=int(config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4))),
        decay="channel",
        decay_bound=bound if bounded else None,
        gate_activation="sigmoid",
    )


def latent_attention(config: Config) -> MLA:
    nope, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    for key in ("qk_head_dim", "head_dim", "num_key_value_heads"):
        config.get(key)  # these follow from the others
    positions = rope(config, rotated, 6e6, interleaved=True)
    return MLA(
        num_heads=config.size("num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=config.size("v_head_dim"),
        scale=score_scale(nope + rotated, positions),
        norm=Norm(eps=1e-6),  # fixed in the reference, whatever rms_norm_eps says
        rope=positions,
        bias=bool(config.get("attention_bias", False)),
        gated=True,
        gate_by_head=True,
    )


def spec(config: Config) -> ModelSpec:
    count, group = config.size("num_hidden_layers"), int(config.get("layer_group_size", 6))
    kinds = layer_kinds(config, "linear_attention", "full_attention")
    regular = ["linear_attention" if (i + 1) % group else "full_attention" for i in range(count)]
    kinds = one_a_layer(config, "layer_types", kinds or regular)
    delta, latent, plain = delta_attention(config), latent_attention(config), mlp(config)
    width, sparse = config.size("moe_intermediate_size"), sparse_layers(config, 2)
    router = sigmoid_router(
        config,
        top_k=config.size("num_experts_per_token", "num_experts_per_tok"),
        normalize=bool(config.get("moe_renormalize", config.get("norm_topk_prob", True))),
        num_groups=int(config.get("num_expert_group", config.get("n_group", 8))),
        topk_groups=int(config.get("topk_group", 4)),
    )
    moe = mixture(config, router, shared=shared_expert(config, width), activation=activation(config))
    config.get("mtp_loss_scaling_factor")

    def mixer(index: int) -> Mixer:
        return latent if kinds[index] == "full_attention" else delta

    def feed_forward(index: int) -> FeedForward:
        return moe if sparse[index] else plain

    reach = int(config.get("model_max_length", config.get("max_position_embeddings", 0)))
    found = decoder(config, "bailing_hybrid", mixer, feed_forward, max_positions=reach)
    extra = found.layers[-1:] * int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 1)))
    return msgspec.structs.replace(found, mtp=extra, mtp_ends=False)


def extra_layers(config: Config) -> tuple[WeightRule, ...]:
    """Multi-token-prediction layers stand behind the last layer; inference does without them."""
    first, count = (
        config.size("num_hidden_layers"),
        int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 1))),
    )
    reason = "multi-token-prediction layer, not used for inference"
    return tuple(ignored(f"(model.|)layers.{first + index}.{{*}}", reason) for index in range(count))


_A, _P = "(model.|)layers.{i}.(attention|self_attn).", "layers.{i}.mixer."
_NAMES = {"q_proj": "q", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b", "q_a_proj": "q_a", "q_b_proj": "q_b"}
ATTENTION_RULES = (
    *in_layers({theirs: f"mixer.{ours}" for theirs, ours in _NAMES.items()}, _A),
    *(rule(f"{_A}(dense|o_proj).{kind}", f"{_P}o.{kind}") for kind in ("weight", "bias")),
    rule(_A + "q_a_layernorm.weight", _P + "q_a_norm.weight"),
    rule(_A + "kv_a_layernorm.weight", _P + "kv_a_norm.weight"),
    rule(_A + "(forget_gate.|)f_proj.weight", _P + "f.weight"),
    rule("(model.|)word_embeddings.weight", "embed.weight"),
)
RULES = (
    TRUNK
    + ATTENTION_RULES
    + tuple(
        msgspec.structs.replace(item, tensor=item.tensor.replace("self_attn", "(attention|self_attn)"))
        for item in DELTA_RULES
    )
    + DENSE
    + MIXTURE
)
FAMILY = Family(
    name="bailing_hybrid",
    model_types=("bailing_hybrid",),
    spec=spec,
    rules=RULES,
    silent={"bailing_hybrid": {"num_shared_experts": 1, "routed_scaling_factor": 2.5}},
    left_out=extra_layers,
)
