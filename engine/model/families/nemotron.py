"""Nemotron-4 and Minitron: LayerNorm with (1 + weight), half of each head rotated, squared ReLU without a gate."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, head_dim, layer_norm, plain_mlp, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    attention = gqa(config, rope=rope(config, head_dim(config), partial=0.5), qkv_bias=bias, output_bias=bias)
    feed_forward = plain_mlp(config, "relu2", bias=bool(config.get("mlp_bias", False)))
    norm = layer_norm(config, "norm_eps", offset=1.0)
    return decoder(config, "nemotron", attention, feed_forward, norm=norm)


RULES = LLAMA
FAMILY = Family(name="nemotron", model_types=("nemotron",), spec=spec, rules=RULES)
