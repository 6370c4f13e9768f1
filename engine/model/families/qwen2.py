"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v, and windows on the upper layers where switched on."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, layer_windows, mlp, silent_rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec

OF_PICTURES = ("qwen2_vl_text", "qwen2_5_vl_text")


def windows(config: Config) -> list[int | None]:
    """Qwen's switch: a window only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    window = config.stated("sliding_window", absent=4096)
    first = int(config.get("max_window_layers", 28))
    if not config.get("use_sliding_window", False):
        config.get("layer_types")
        return [None] * config.size("num_hidden_layers")
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if index >= first else None for index in range(config.size("num_hidden_layers"))]


def spec(config: Config) -> ModelSpec:
    if config.get("model_type") in OF_PICTURES:
        silent_rope(config, rope_type="default", rope_theta=1000000.0)
    window = windows(config)
    feed_forward = mlp(config)
    return decoder(config, "qwen2", lambda i: gqa(config, qkv_bias=True, window=window[i]), feed_forward)


RULES = LLAMA
FAMILY = Family(
    name="qwen2",
    model_types=("qwen2", *OF_PICTURES),
    spec=spec,
    rules=RULES,
    silent={name: {"num_key_value_heads": 8, "rms_norm_eps": 1e-5} for name in OF_PICTURES},
)
