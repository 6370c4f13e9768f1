"""MiMo-V2-Flash: values narrower than keys, windows with sinks and twice the key heads, experts as in DeepSeek-V3."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    TRUNK,
    decoder,
    gqa,
    mlp,
    one_a_layer,
    rms,
    rope_of_kind,
    silent_rope,
)
from firstlight.engine.model.families.deepseek_v3 import extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, sigmoid_router, sparse_layers
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, ModelSpec

FULL, WINDOW = "full_attention", "sliding_attention"
ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
}


def _kinds(config: Config) -> list[str]:
    """By `layer_types`, or by the release's `hybrid_layer_pattern` of ones for windows."""
    count = config.size("num_hidden_layers")
    regular = [FULL if index == 0 or (index + 1) % 6 == 0 else WINDOW for index in range(count)]
    pattern = config.get("hybrid_layer_pattern")
    kinds = config.get("layer_types", [WINDOW if one else FULL for one in pattern] if pattern else regular)
    return one_a_layer(config, "layer_types", kinds, FULL, WINDOW)


def _sparse(config: Config) -> list[bool]:
    frequencies = config.get("moe_layer_freq")
    if isinstance(frequencies, list) and "mlp_layer_types" not in config:
        return [bool(one) for one in frequencies]
    return sparse_layers(config, 1)


def _attention(config: Config, kind: str) -> Attention:
    """Windows have key heads, positions and sinks of their own, whose keys in the release begin with `swa_`."""
    near, size, few = kind == WINDOW, int(config.get("head_dim", 192)), config.size("num_key_value_heads")
    width, heads = int(config.get("v_head_dim", 128)), config.size("num_attention_heads")
    for key, value in (("swa_head_dim", size), ("swa_v_head_dim", width), ("swa_num_attention_heads", heads)):
        config.only(key, value, default=value)
    positions = rope_of_kind(config, size, kind, 5000000.0, float(config.get("swa_rope_theta", 10000.0)), 1.0)
    if near and not (config.get("rope_parameters") or {}).get(WINDOW):
        rotated = int(size * float(config.get("partial_rotary_factor", 1.0)))
        positions = msgspec.structs.replace(positions, dim=rotated)
    config.get("attention_chunk_size"), config.get("sliding_window")  # the first repeats the second
    window = int(config.get("sliding_window_size", 0)) + 1 if "sliding_window_size" in config else None
    window = config.size("sliding_window") if window is None else window
    return gqa(
        config,
        head_dim=size,
        num_kv_heads=int(config.get("swa_num_key_value_heads", few * 2)) if near else few,
        scale=size**-0.5,
        v_dim=width,
        v_scale=float(config.stated("attention_value_scale", absent=0.707) or 1.0),
        rope=positions,
        qkv_bias=bool(config.get("attention_bias", False)),
        window=window if near else None,
        sinks=bool(config.get(f"add_{'swa' if near else 'full'}_attention_sink_bias", near)),
    )


def spec(config: Config) -> ModelSpec:
    if "partial_rotary_factor" not in config:
        silent_rope(config, **ROPE)
    norm = rms(config, float(config.get("layernorm_epsilon", 1e-5)))
    config.only("topk_method", "noaux_tc", default="noaux_tc")
    config.only("scoring_func", "sigmoid", default="sigmoid")
    kinds, mixers = _kinds(config), {kind: _attention(config, kind) for kind in (FULL, WINDOW)}
    dense, moe, sparse = mlp(config), mixture(config, sigmoid_router(config)), _sparse(config)
    return decoder(
        config, "mimo_v2_flash", lambda i: mixers[kinds[i]], lambda i: moe if sparse[i] else dense, norm=norm
    )


SINKS = rule("(model.|)layers.{i}.self_attn.(sinks|attention_sink_bias)", "layers.{i}.mixer.sinks")
RULES = (*TRUNK, *ATTENTION, SINKS, *DENSE, *MIXTURE)
FAMILY = Family(
    name="mimo_v2_flash",
    model_types=("mimo_v2_flash",),
    spec=spec,
    rules=RULES,
    silent={"mimo_v2_flash": {"num_key_value_heads": 4}},
    left_out=extra_layers,
)
