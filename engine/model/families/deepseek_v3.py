"""DeepSeek-V3 and R1, and Kimi K2 (the same architecture): latent attention, sigmoid-routed grouped experts."""

import math
from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, decoder, mlp, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, shared_expert, sigmoid_router, sparse_layers
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import MLA, LayerSpec, ModelSpec, MoE, Norm, Rope


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


def attention(config: Config, **fields: Any) -> MLA:
    """Latent attention from the usual keys; `fields` overrides or adds."""
    nope, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    config.get("qk_head_dim"), config.get("head_dim"), config.get("num_key_value_heads")  # follow from the others
    neighbours = bool(config.get("rope_interleave", True))
    positions = fields["rope"] if "rope" in fields else rope(config, rotated, interleaved=neighbours)
    values: dict[str, Any] = {
        "num_heads": config.size("num_attention_heads"),
        "q_lora_rank": config.stated("q_lora_rank", absent=1536),
        "kv_lora_rank": config.size("kv_lora_rank"),
        "nope_dim": nope,
        "rope_dim": rotated,
        "v_dim": config.size("v_head_dim"),
        "scale": score_scale(nope + rotated, positions),
        "norm": Norm(eps=1e-6),  # fixed in the reference, whatever rms_norm_eps says
        "rope": positions,
        "bias": bool(config.get("attention_bias", False)),
    }
    return MLA(**{**values, **fields})


def experts(config: Config) -> MoE:
    """The mixture of V3 and of those that took it over; its keys say nothing else."""
    config.only("topk_method", "noaux_tc", default="noaux_tc")
    config.only("moe_layer_freq", 1, default=1)
    config.only("scoring_func", "sigmoid", default="sigmoid")
    config.only("moe_router_dtype", "float32", default="float32")
    width = config.size("moe_intermediate_size")
    return mixture(config, sigmoid_router(config), shared=shared_expert(config, width))


def with_extra_layers(config: Config, model: ModelSpec, extra: LayerSpec, ends: bool = True) -> ModelSpec:
    """The model and its multi-token-prediction layers, each like `extra`; `ends`: with embedding and head."""
    count = int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)))
    return msgspec.structs.replace(model, mtp=(extra,) * count, mtp_ends=ends)


def spec(config: Config) -> ModelSpec:
    mixer, dense, moe = attention(config), mlp(config), experts(config)
    sparse = sparse_layers(config, 3)
    plain = decoder(config, "deepseek_v3", mixer, lambda i: moe if sparse[i] else dense)
    return with_extra_layers(config, plain, plain.layers[-1])


def extra_layers(config: Config) -> tuple[WeightRule, ...]:
    """Multi-token-prediction layers stand behind the last layer; inference does without them."""
    count = int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)))
    first = config.size("num_hidden_layers")
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
RULES = TRUNK + MLA_RULES + DENSE + MIXTURE
TYPES = ("deepseek_v3", "kimi_k2")
FAMILY = Family(
    name="deepseek_v3",
    model_types=TYPES,
    spec=spec,
    rules=RULES,
    silent={
        name: {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5} for name in TYPES
    },
    left_out=extra_layers,
)
