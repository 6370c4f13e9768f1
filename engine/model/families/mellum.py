"""Mellum 2: Qwen3-MoE's layers, some with windows, each kind with rotary positions of its own."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    QK_NORM,
    TRUNK,
    decoder,
    gqa,
    layer_windows,
    mlp,
    rms,
    rope_of_kind,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router, sparse_layers
from firstlight.engine.model.rules import ignored
from firstlight.engine.model.spec import Attention, ModelSpec

FULL, WINDOW = "full_attention", "sliding_attention"
ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
}


def spec(config: Config) -> ModelSpec:
    silent_rope(config, **ROPE)
    count, size = config.size("num_hidden_layers"), int(config.get("head_dim", 128))
    window, bias = config.stated("sliding_window", absent=1024), bool(config.get("attention_bias", False))
    windows = layer_windows(config, window) if "layer_types" in config else [None] * count

    def attention(index: int) -> Attention:
        kind = FULL if windows[index] is None else WINDOW
        return gqa(
            config,
            head_dim=size,
            scale=size**-0.5,
            rope=rope_of_kind(config, size, kind, 500000.0, 10000.0),
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=rms(config),
        )

    moe = mixture(config, router(config, normalize=bool(config.get("norm_topk_prob", True))))
    dense, sparse = mlp(config), sparse_layers(config)
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        config.get(key)  # of a layer that inference does without
    return decoder(config, "mellum", attention, lambda i: moe if sparse[i] else dense)


RULES = (
    *TRUNK,
    *ATTENTION,
    *QK_NORM,
    *DENSE,
    *MIXTURE,
    ignored("mtp.{*}", "multi-token-prediction layer, not used for inference"),
)
FAMILY = Family(
    name="mellum", model_types=("mellum",), spec=spec, rules=RULES, silent={"mellum": {"num_key_value_heads": 4}}
)
