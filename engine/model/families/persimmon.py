"""Persimmon: one matrix for the queries, keys and values of each head, which have LayerNorms; squared ReLU."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    TRUNK,
    decoder,
    gqa,
    head_dim,
    in_layers,
    layer_norm,
    plain_mlp,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    norm = layer_norm(config, "layer_norm_eps")
    attention = gqa(
        config,
        num_kv_heads=config.size("num_attention_heads"),
        fused=True,
        rope=rope(config, head_dim(config), partial=0.5),
        qkv_bias=True,
        output_bias=True,
        qk_norm=norm if config.get("qk_layernorm", True) else None,
    )
    feed_forward = plain_mlp(config, "relu2", bias=True)
    return decoder(config, "persimmon", attention, feed_forward, norm=norm)


NAMES = {
    "self_attn.query_key_value": "mixer.qkv",
    "self_attn.dense": "mixer.o",
    "self_attn.q_layernorm": "mixer.q_norm",
    "self_attn.k_layernorm": "mixer.k_norm",
    "mlp.dense_h_to_4h": "ffn.up",
    "mlp.dense_4h_to_h": "ffn.down",
}
FAMILY = Family(name="persimmon", model_types=("persimmon",), spec=spec, rules=TRUNK + in_layers(NAMES))
