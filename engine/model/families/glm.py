"""GLM-4-9B, GLM-Z1 and GLM-4-0414: half of each head rotated in neighbouring pairs, gate and up in one tensor.

`glm4` norms what each block gives as well as what it takes.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    ENDS,
    FUSED_DENSE,
    PRE,
    SANDWICH,
    decoder,
    gqa,
    head_dim,
    in_layers,
    mlp,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    sees = model_type == "glm4v_text"
    size = head_dim(config) if sees else int(config.get("head_dim", 128))
    attention = gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=rope(config, size, interleaved=True, partial=1.0 if sees else 0.5),
        qkv_bias=bool(config.get("attention_bias", True)),
    )
    feed_forward = mlp(config)
    norms = SANDWICH if model_type in ("glm4", "glm4v_text") else PRE
    norm = rms(config, 1e-5 if sees else 1.5625e-07)
    return decoder(config, model_type, attention, feed_forward, norm=norm, norms=norms)


RULES = (
    ENDS
    + ATTENTION
    + FUSED_DENSE
    + in_layers(
        {
            "mlp.down_proj": "ffn.down",
            "input_layernorm": "mixer_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_self_attn_layernorm": "post_mixer_norm",
            "post_mlp_layernorm": "post_ffn_norm",
        }
    )
)
TYPES = ("glm", "glm4", "glm4v_text")
FAMILY = Family(
    name="glm", model_types=TYPES, spec=spec, rules=RULES, silent={name: {"num_key_value_heads": 2} for name in TYPES}
)
