"""Llama 2, 3.x and the many models that keep its layout (SmolLM2 among them)."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    attention = gqa(config, qkv_bias=bias, output_bias=bias)
    feed_forward = mlp(config, bias=bool(config.get("mlp_bias", False)))
    return decoder(config, "llama", attention, feed_forward)


RULES = LLAMA
FAMILY = Family(name="llama", model_types=("llama",), spec=spec, rules=RULES)
