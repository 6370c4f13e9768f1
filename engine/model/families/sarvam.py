"""Sarvam: 30B, GLM-4.5's layers with whole heads rotated, and 105B, DeepSeek-V3's; values and names of their own."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import bailing_moe_v2, deepseek_v3
from firstlight.engine.model.families.common import ATTENTION, QK_NORM, decoder, gqa, mlp, rms, rope, silent_rope
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES, experts, extra_layers, with_extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import sparse_layers
from firstlight.engine.model.spec import ModelSpec


def _grouped(config: Config) -> ModelSpec:
    silent_rope(config, rope_type="default", rope_theta=8000000.0)
    norm, dense, moe, sparse = rms(config), mlp(config), experts(config), sparse_layers(config, 1)
    size = int(config.get("head_dim", 64))
    attention = gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=rope(config, size, 8000000.0, partial=1.0),
        qkv_bias=bool(config.get("attention_bias", config.get("use_qkv_bias", False))),
        qk_norm=norm if config.get("use_qk_norm", True) else None,
    )
    plain = decoder(config, "sarvam_moe", attention, lambda i: moe if sparse[i] else dense, norm=norm)
    return with_extra_layers(config, plain, plain.layers[-1])


def _latent(config: Config) -> ModelSpec:
    config.get("q_head_dim")  # follows from the others
    return deepseek_v3.spec(config)


READINGS = {"sarvam_moe": _grouped, "sarvam_mla": _latent}


def spec(config: Config) -> ModelSpec:
    return READINGS[str(config.need("model_type"))](config)


RULES = bailing_moe_v2.RULES + ATTENTION + QK_NORM + MLA_RULES
FAMILY = Family(
    name="sarvam",
    model_types=tuple(READINGS),
    spec=spec,
    rules=RULES,
    silent={
        "sarvam_moe": {"num_key_value_heads": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        "sarvam_mla": {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
        },
    },
    left_out=extra_layers,
    classes={"sarvam_moe": "Glm4MoeForCausalLM", "sarvam_mla": "DeepseekV3ForCausalLM"},
)
