"""Hunyuan dense models: Llama's layout, queries and keys normed behind the rotation, a base stretched for good."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import LLAMA, decoder, gqa, mlp, rms
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.hunyuan_v1_moe import QK_NORM
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    bias, norm = bool(config.get("attention_bias", False)), rms(config, 1e-5)
    config.get("eod_token_id")
    config.only("use_qk_norm", True, default=True)
    config.only("use_cla", False, default=False)
    attention = gqa(config, qkv_bias=bias, output_bias=bias, qk_norm=norm, qk_norm_last=True)
    feed_forward = mlp(config)
    return decoder(config, "hunyuan_v1_dense", attention, feed_forward, norm=norm)


RULES = LLAMA + QK_NORM
FAMILY = Family(name="hunyuan_v1_dense", model_types=("hunyuan_v1_dense",), spec=spec, rules=RULES)
