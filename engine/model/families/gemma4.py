"""Gemma 4 (text; the dense models whose layers stand alone): wider heads where layers see everything, whose keys may be
their values and of which only the fastest frequencies turn; a learned factor on what a layer gives.
"""

from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    QK_NORM,
    SANDWICH,
    SANDWICH_NORMS,
    activation,
    decoder,
    gqa,
    layer_windows,
    mlp,
    rms,
    rope_of_kind,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, ModelSpec, Norm


def _windows(config: Config) -> list[int | None]:
    window, count = config.size("sliding_window"), config.size("num_hidden_layers")
    if "layer_types" in config:
        return [*layer_windows(config, window)[:-1], None]  # the last sees everything whatever the file says
    return [window if (index + 1) % 6 and index + 1 < count else None for index in range(count)]


def _wide(config: Config, index: int) -> tuple[int, int]:
    """Width and number of key heads of a layer that sees everything."""
    own: dict[str, Any] = config.get("per_layer_config", {}).get(str(index), {})
    size = own.get("head_dim", config.get("global_head_dim", 512))
    shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", False) else None
    return int(size), int(own.get("num_key_value_heads", shared or config.size("num_key_value_heads")))


ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


def spec(config: Config) -> ModelSpec:
    silent_rope(config, **ROPE)
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.get(key, 256 if key.startswith("hidden") else 0):
            config.unsupported(key, config.get(key, 256), "0: layers that stand alone")
    config.only("enable_moe_block", False, default=False)
    config.only("use_bidirectional_attention", "vision", None, default=None)
    for key in ("use_double_wide_mlp", "vocab_size_per_layer_input", "num_experts", "top_k_experts"):
        config.get(key)  # of what was just refused
    norm, windows, bias = rms(config), _windows(config), bool(config.get("attention_bias", False))
    feed_forward = mlp(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))

    def attention(index: int) -> Attention:
        near = windows[index] is not None
        narrow = int(config.get("head_dim", 256)), config.size("num_key_value_heads")
        size, kv_heads = narrow if near else _wide(config, index)
        return gqa(
            config,
            head_dim=size,
            num_kv_heads=kv_heads,
            scale=1.0,
            rope=rope_of_kind(config, size, "sliding_attention" if near else "full_attention", 1000000.0, 10000.0),
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm,
            v_norm=Norm(eps=norm.eps, weight=False),
            keys_as_values=not near and bool(config.get("attention_k_eq_v", False)),
        )

    return decoder(
        config,
        "gemma4",
        attention,
        lambda i: feed_forward,
        norm=norm,
        norms=SANDWICH,
        layer={"output_scale": True},
        tie_default=True,
        embed_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


SCALE = rule("(model.|)layers.{i}.layer_scalar", "layers.{i}.output_scale")
RULES = (*ENDS, *ATTENTION, *QK_NORM, *DENSE, *SANDWICH_NORMS, SCALE)
FAMILY = Family(name="gemma4", model_types=("gemma4_text",), spec=spec, rules=RULES)
