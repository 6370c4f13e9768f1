"""Qwen3 (dense): RMSNorm on every query and key head, head size apart from the width."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, QK_NORM, decoder, gqa, mlp, rms, rope, silent_rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.qwen2 import windows
from firstlight.engine.model.spec import Attention, ModelSpec


def attention(config: Config, head_dim: int, window: int | None) -> Attention:
    """Qwen3's attention, shared by the mixture-of-experts variant."""
    if config.get("model_type") in ("qwen3_vl_text", "qwen3_vl_moe_text"):
        silent_rope(config, rope_type="default", rope_theta=500000.0)
    bias = bool(config.get("attention_bias", False))
    return gqa(
        config,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(config, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=rms(config),
        window=window,
    )


def spec(config: Config) -> ModelSpec:
    window, feed_forward = windows(config), mlp(config)
    head_dim = int(
        config.stated("head_dim", absent=128) or config.size("hidden_size") // config.size("num_attention_heads")
    )
    return decoder(config, "qwen3", lambda i: attention(config, head_dim, window[i]), feed_forward)


RULES = LLAMA + QK_NORM
FAMILY = Family(name="qwen3", model_types=("qwen3", "qwen3_vl_text"), spec=spec, rules=RULES)
