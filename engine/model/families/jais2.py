"""Jais 2: Llama's attention between LayerNorms, biases everywhere, squared ReLU without a gate."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, layer_norm, plain_mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", True))
    attention = gqa(config, qkv_bias=bias, output_bias=bias)
    feed_forward = plain_mlp(config, "relu2", bias=bool(config.get("mlp_bias", True)))
    norm = layer_norm(config, "layer_norm_eps")
    return decoder(config, "jais2", attention, feed_forward, norm=norm)


RULES = LLAMA
FAMILY = Family(name="jais2", model_types=("jais2",), spec=spec, rules=RULES)
