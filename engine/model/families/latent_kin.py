"""Latent attention in other company: GLM-4.7-Flash and Youtu-LLM as DeepSeek-V3, MiniCPM3 with scaled embeddings and
branches, Mistral 4 with queries sharpened at far positions and softmax-routed experts.
"""

from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    DENSE,
    TRUNK,
    decoder,
    llama4_temperature,
    mlp,
    rms,
    rope,
    silent_rope,
)
from firstlight.engine.model.families.deepseek_v3 import (
    MLA_RULES,
    attention,
    experts,
    extra_layers,
    score_scale,
    with_extra_layers,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, shared_expert, sparse_layers
from firstlight.engine.model.spec import MLA, ModelSpec, MoE

ROPE = {  # Mistral 4's
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _sharpened(config: Config) -> MLA:
    """`partial_rotary_factor` among the rotary parameters only repeats the two sizes of a query."""
    rotated = config.size("qk_rope_head_dim")
    silent_rope(config, **ROPE)
    positions = rope(
        config,
        rotated,
        interleaved=bool(config.get("rope_interleave", True)),
        read_elsewhere=("llama_4_scaling_beta", "partial_rotary_factor", "max_position_embeddings"),
    )
    scale = score_scale(config.size("qk_nope_head_dim") + rotated, positions)
    return attention(config, rope=positions, scale=scale, temperature=llama4_temperature(config))


def _softmax_experts(config: Config) -> MoE:
    chooses = router(
        config,
        normalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=int(config.get("n_group", 1)),
        topk_groups=int(config.get("topk_group", 1)),
        group_score="top2_sum",
    )
    return mixture(config, chooses, shared=shared_expert(config, config.size("moe_intermediate_size")))


def _minicpm(config: Config) -> dict[str, Any]:
    count, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    return {
        "norm": rms(config, 1e-5),
        "layer": {"residual_scale": float(config.stated("scale_depth", absent=1.4) or count**0.5) / count**0.5},
        "embed_scale": float(config.get("scale_emb", 12)),
        "logit_scale": float(config.stated("dim_model_base", absent=256) or hidden) / hidden,
    }


def _dense(config: Config, model_type: str) -> ModelSpec:
    config.only("mlp_bias", False, default=False)
    config.get("embedding_initializer_range")
    mixer, feed_forward, fields = attention(config), mlp(config), {}
    if model_type == "minicpm3":
        mixer, fields = attention(config, rope=rope(config, config.size("qk_rope_head_dim"))), _minicpm(config)
    return decoder(config, model_type, mixer, feed_forward, tie_default=True, **fields)


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    if model_type in ("minicpm3", "youtu"):
        return _dense(config, model_type)
    if model_type == "mistral4":
        mixer, moe, sparse, norm = _sharpened(config), _softmax_experts(config), sparse_layers(config), rms(config)
    else:
        mixer, moe, sparse, norm = attention(config), experts(config), sparse_layers(config, 1), rms(config, 1e-5)
    dense = mlp(config)
    plain = decoder(config, model_type, mixer, lambda i: moe if sparse[i] else dense, norm=norm)
    return with_extra_layers(config, plain, plain.layers[-1])


RULES = TRUNK + MLA_RULES + DENSE + MIXTURE
FAMILY = Family(
    name="latent_kin",
    model_types=("glm4_moe_lite", "minicpm3", "mistral4", "youtu"),
    spec=spec,
    rules=RULES,
    silent={
        "glm4_moe_lite": {"q_lora_rank": 768, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
        "minicpm3": {"q_lora_rank": 768},
        "mistral4": {"q_lora_rank": 1024, "n_shared_experts": 1},
    },
    left_out=extra_layers,
)
