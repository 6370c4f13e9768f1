"""Command R, R+ and R7B, and Aya: attention and feed-forward side by side behind one LayerNorm without bias.

`cohere2` has windows on three of four layers, and those alone rotate.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    LLAMA,
    QK_NORM,
    decoder,
    gqa,
    head_dim,
    layer_norm,
    layer_windows,
    mlp,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import Attention, ModelSpec


def _windows(config: Config) -> list[int | None]:
    window, every = config.stated("sliding_window", absent=4096), int(config.get("sliding_window_pattern", 4))
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if (index + 1) % every else None for index in range(config.size("num_hidden_layers"))]


def spec(config: Config) -> ModelSpec:
    for key, value in (
        ("position_embedding_type", "rope_gptj"),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
    ):
        config.only(key, value, default=value)
    for key in ("layer_switch", "order_of_interleaved_layers", "rotary_pct", "use_embedding_sharing"):
        config.get(key)  # what layer_types, rope and tie_word_embeddings say
    config.get("cache_implementation"), config.get("use_parallel_embedding")
    model_type, norm = str(config.need("model_type")), layer_norm(config, "layer_norm_eps", bias=False)
    windows = _windows(config) if model_type == "cohere2" else [None] * config.size("num_hidden_layers")
    positions = rope(config, head_dim(config), 10000.0 if model_type == "cohere2" else 500000.0, interleaved=True)
    bias, normed = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))

    def attention(index: int) -> Attention:
        turns = model_type == "cohere" or windows[index] is not None
        return gqa(
            config,
            rope=positions if turns else None,
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm if normed else None,
            qk_norm_over="heads",
        )

    feed_forward = mlp(config)
    return decoder(
        config,
        model_type,
        attention,
        feed_forward,
        norm=norm,
        norms=("mixer_norm",),
        layer={"parallel": True},
        tie_default=bool(config.get("use_embedding_sharing", True)),
        logit_scale=float(config.get("logit_scale", 0.0625)),
    )


RULES = LLAMA + QK_NORM
FAMILY = Family(name="cohere", model_types=("cohere", "cohere2"), spec=spec, rules=RULES)
