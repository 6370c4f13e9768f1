"""Mistral: Llama's layout with an optional sliding window on every layer."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    attention = gqa(config, window=config.stated("sliding_window", absent=4096))
    feed_forward = mlp(config)
    return decoder(config, "mistral", attention, feed_forward)


RULES = LLAMA
FAMILY = Family(
    name="mistral", model_types=("mistral",), spec=spec, rules=RULES, silent={"mistral": {"num_key_value_heads": 8}}
)
