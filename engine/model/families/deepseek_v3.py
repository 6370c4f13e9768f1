"""DeepSeek-V3 and R1, and Kimi K2 (the same architecture): latent attention, sigmoid-routed grouped experts."""

import math

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, activation, decoder, experts, mlp, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import MLA, MLP, FeedForward, ModelSpec, MoE, Norm, Rope, Router


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 m ln(s) + 1 (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_scale(query_dim: int, positions: Rope | None) -> float:
    """query_dim^-0.5, corrected by YaRN's temperature when `mscale_all_dim` asks for it."""
    scale = query_dim**-0.5
    scaling = positions.scaling if positions else None
    if scaling is not None and scaling.kind == "yarn" and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def attention(config: Config) -> MLA:
    nope, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    config.get("qk_head_dim"), config.get("head_dim"), config.get("num_key_value_heads")  # follow from the others
    positions = rope(config, rotated, interleaved=bool(config.get("rope_interleave", True)))
    return MLA(
        num_heads=config.size("num_attention_heads"),
        q_lora_rank=config.stated("q_lora_rank", absent=1536),
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=config.size("v_head_dim"),
        scale=score_scale(nope + rotated, positions),
        norm=Norm(eps=1e-6),  # fixed in the reference, whatever rms_norm_eps says
        rope=positions,
        bias=bool(config.get("attention_bias", False)),
    )


def mixture(config: Config) -> MoE:
    config.only("topk_method", "noaux_tc", default="noaux_tc")
    config.only("moe_layer_freq", 1, default=1)
    width, act = config.size("moe_intermediate_size"), activation(config)
    return MoE(
        num_experts=config.size("n_routed_experts", "num_local_experts"),
        intermediate=width,
        activation=act,
        router=Router(
            top_k=config.size("num_experts_per_tok"),
            scoring=config.only("scoring_func", "sigmoid", default="sigmoid"),
            normalize=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            correction_bias=True,
            num_groups=int(config.get("n_group", 1)),
            topk_groups=int(config.get("topk_group", 1)),
            group_score="top2_sum",
            float32=True,
        ),
        shared=MLP(intermediate=width * config.size("n_shared_experts"), activation=act),
    )


def spec(config: Config) -> ModelSpec:
    mixer, dense, moe = attention(config), mlp(config), mixture(config)
    first_dense = int(config.get("first_k_dense_replace", 3))

    def feed_forward(index: int) -> FeedForward:
        return dense if index < first_dense else moe

    plain = decoder(config, "deepseek_v3", lambda i: mixer, feed_forward)
    extra = int(config.get("num_nextn_predict_layers", 0))
    return msgspec.structs.replace(plain, mtp=plain.layers[-1:] * extra)


def extra_layers(config: Config) -> tuple[WeightRule, ...]:
    """Multi-token-prediction layers stand behind the last layer; inference does without them."""
    count, first = int(config.get("num_nextn_predict_layers", 0)), config.size("num_hidden_layers")
    return tuple(
        ignored(f"(model.|)layers.{first + index}.{{*}}", "multi-token-prediction layer, not used for inference")
        for index in range(count)
    )


_A = "(model.|)layers.{i}.self_attn."
_P = "layers.{i}.mixer."
_MLA_NAMES = {
    "q_proj": "q",
    "q_a_proj": "q_a",
    "q_b_proj": "q_b",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
}
MLA_RULES = (
    *(
        rule(f"{_A}{theirs}.{kind}", f"{_P}{ours}.{kind}")
        for theirs, ours in _MLA_NAMES.items()
        for kind in ("weight", "bias")
    ),
    rule(_A + "q_a_layernorm.weight", _P + "q_a_norm.weight"),
    rule(_A + "kv_a_layernorm.weight", _P + "kv_a_norm.weight"),
)
SHARED_RULES = tuple(
    rule(f"(model.|)layers.{{i}}.mlp.shared_experts.{part}_proj.weight", f"layers.{{i}}.ffn.shared.{part}.weight")
    for part in ("gate", "up", "down")
)
RULES = (
    TRUNK
    + MLA_RULES
    + DENSE
    + SHARED_RULES
    + experts("mlp", "gate_proj", "up_proj", "down_proj")
    + (rule("(model.|)layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.ffn.router.correction_bias"),)
)
FAMILY = Family(
    name="deepseek_v3", model_types=("deepseek_v3", "kimi_k2"), spec=spec, rules=RULES, left_out=extra_layers
)
