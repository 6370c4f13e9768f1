"""OLMo: norms without weights, clamped projections. OLMo 2 and 3: norms behind the blocks, queries and keys normed over
their full width; OLMo 3 with windows on three of four layers.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    POST,
    POST_NORMS,
    PRE,
    QK_NORM,
    decoder,
    gqa,
    head_dim,
    layer_windows,
    mlp,
    rms,
    rope_of_kind,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import Attention, ModelSpec, Norm


def _windows(config: Config) -> list[int | None]:
    """OLMo 3: of four layers the last sees everything, unless the file lists them."""
    window = config.stated("sliding_window", absent=4096)
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if (index + 1) % 4 else None for index in range(config.size("num_hidden_layers"))]


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    is_first = model_type == "olmo"
    norm = Norm(kind="layer", eps=1e-5, weight=False) if is_first else rms(config, 1e-5)
    windows = _windows(config) if model_type == "olmo3" else [None] * config.size("num_hidden_layers")
    bias = bool(config.get("attention_bias", False))

    def attention(index: int) -> Attention:
        kind = "full_attention" if windows[index] is None else "sliding_attention"
        return gqa(
            config,
            rope=rope_of_kind(config, head_dim(config), kind, 500000.0 if model_type == "olmo3" else 10000.0),
            qkv_bias=bias,
            output_bias=bias,
            clip=config.get("clip_qkv"),
            qk_norm=None if is_first else norm,
            qk_norm_over="width",
            window=windows[index],
        )

    feed_forward = mlp(config)
    norms = PRE if is_first else POST
    return decoder(config, model_type, attention, feed_forward, norm=norm, norms=norms)


RULES = ENDS + POST_NORMS + ATTENTION + QK_NORM + DENSE
FAMILY = Family(name="olmo", model_types=("olmo", "olmo2", "olmo3"), spec=spec, rules=RULES)
