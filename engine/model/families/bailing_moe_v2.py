"""Ling 2 and Ring 1T: grouped-query attention whose projections are one matrix, DeepSeek-V3's mixture of experts.

The vendor's modelling code is the reference (github.com/inclusionAI/Ling-V2, models/modeling_bailing_moe_v2.py).
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, decoder, gqa, head_dim, in_layers, mlp, rms, rope
from firstlight.engine.model.families.deepseek_v3 import extra_layers, with_extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, shared_expert, sigmoid_router, sparse_layers
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import ModelSpec, MoE, Rope


def positions(config: Config, size: int) -> Rope:
    """The part of a head that rotates stands as a share, as a width, or as both."""
    share, width = config.get("partial_rotary_factor"), config.get("rotary_dim")
    if share is not None and width is not None and int(size * share) != width:
        config.refuse("rotary_dim", width, f"partial_rotary_factor {share} of head_dim {size}")
    return rope(config, size, 600000.0, partial=1.0 if width is None else width / size)


def experts(config: Config) -> MoE:
    """The mixture; the first generation, which has the same model type, scores by softmax and is not this."""
    is_named = config.get("model_type") == "bailing_moe_v2"
    config.only("score_function", "sigmoid", default="sigmoid" if is_named else "softmax")
    config.only("moe_router_enable_expert_bias", True, default=True)
    config.only("router_dtype", "fp32", default="fp32")
    config.only("norm_topk_prob", True, default=True)
    width = config.size("moe_intermediate_size")
    config.only("moe_shared_expert_intermediate_size", width, default=width)
    chosen = config.size("num_experts_per_tok")
    return mixture(config, sigmoid_router(config, normalize=chosen > 1), shared=shared_expert(config, width))


def spec(config: Config) -> ModelSpec:
    config.only("use_sliding_window", False, default=False)
    config.only("norm_head", False, default=False)
    for key in ("sliding_window", "max_window_layers", "output_dropout", "mtp_loss_scaling_factor"):
        config.get(key)  # without effect: windows are off, the rest is of training
    norm, dense, moe, sparse = rms(config), mlp(config), experts(config), sparse_layers(config, 1)
    attention = gqa(
        config,
        rope=positions(config, head_dim(config)),
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        output_bias=bool(config.get("use_bias", False)),
        qk_norm=norm if config.get("use_qk_norm", True) else None,
    )
    plain = decoder(config, "bailing_moe_v2", attention, lambda i: moe if sparse[i] else dense, norm=norm)
    return with_extra_layers(config, plain, plain.layers[-1], ends=False)


_A, _P = "(model.|)layers.{i}.attention.", "layers.{i}.mixer."
RULES = (
    *TRUNK,
    rule("(model.|)word_embeddings.weight", "embed.weight"),
    *(rule(f"{_A}query_key_value.{kind}", *(f"{_P}{part}.{kind}" for part in "qkv")) for kind in ("weight", "bias")),
    *in_layers({"dense": "mixer.o", "query_layernorm": "mixer.q_norm", "key_layernorm": "mixer.k_norm"}, _A),
    *DENSE,
    *MIXTURE,
)
TYPES = ("bailing_moe_v2", "bailing_moe")
FAMILY = Family(
    name="bailing_moe_v2",
    model_types=TYPES,
    spec=spec,
    rules=RULES,
    silent={name: {"num_shared_experts": 1, "n_group": 8, "topk_group": 4} for name in TYPES},
    left_out=extra_layers,
)
