"""Phi-1 to Phi-2: attention and feed-forward side by side behind one norm, biases everywhere, partial rotation."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ENDS, decoder, gqa, head_dim, in_layers, layer_norm, plain_mlp, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    norm = layer_norm(config, "layer_norm_eps")
    attention = gqa(
        config,
        rope=rope(config, head_dim(config), partial=0.5),
        qkv_bias=True,
        output_bias=True,
        qk_norm=norm if config.get("qk_layernorm", False) else None,
    )
    feed_forward = plain_mlp(config, "gelu_new", bias=True)
    return decoder(
        config,
        "phi",
        attention,
        feed_forward,
        norm=norm,
        norms=("mixer_norm",),
        layer={"parallel": True},
        head_bias=True,
    )


NAMES = {
    "input_layernorm": "mixer_norm",
    "self_attn.q_proj": "mixer.q",
    "self_attn.k_proj": "mixer.k",
    "self_attn.v_proj": "mixer.v",
    "self_attn.dense": "mixer.o",
    "self_attn.q_layernorm": "mixer.q_norm",
    "self_attn.k_layernorm": "mixer.k_norm",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}
FAMILY = Family(name="phi", model_types=("phi",), spec=spec, rules=ENDS + in_layers(NAMES))
