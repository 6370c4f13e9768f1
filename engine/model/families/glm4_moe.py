"""GLM-4.5, 4.6 and 4.7: grouped-query attention, half of each head rotated, over DeepSeek-V3's mixture of experts."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, QK_NORM, decoder, gqa, head_dim, mlp, rms, rope
from firstlight.engine.model.families.deepseek_v3 import experts, extra_layers, with_extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, sparse_layers
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    norm, dense, moe, sparse = rms(config, 1e-5), mlp(config), experts(config), sparse_layers(config, 1)
    attention = gqa(
        config,
        rope=rope(config, head_dim(config), partial=0.5),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=norm if config.get("use_qk_norm", False) else None,
    )
    plain = decoder(config, "glm4_moe", attention, lambda i: moe if sparse[i] else dense, norm=norm)
    return with_extra_layers(config, plain, plain.layers[-1])


RULES = LLAMA + QK_NORM + MIXTURE
MODEL_TYPES = ("glm4_moe", "glm4v_moe_text")
FAMILY = Family(
    name="glm4_moe",
    model_types=MODEL_TYPES,
    spec=spec,
    rules=RULES,
    silent={
        "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1},
        "glm4v_moe_text": {"num_key_value_heads": 8, "n_shared_experts": 1, "attention_bias": True},
    },
    left_out=extra_layers,
)
