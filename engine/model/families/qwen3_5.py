"""Qwen3.5 text, dense and with experts: Qwen3-Next with the projections of its delta attention stored apart."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder, mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.qwen3_next import RULES, attention, delta_attention, full_layers, mixture, norm
from firstlight.engine.model.spec import FeedForward, Mixer, ModelSpec


def spec(config: Config) -> ModelSpec:
    """The decoder; it has experts where the file counts any."""
    softmax, delta, full = attention(config), delta_attention(config, fused=False), full_layers(config)
    feed_forward: FeedForward = mixture(config) if "num_experts" in config else mlp(config)
    config.only("mamba_ssm_dtype", "float32", default="float32")

    def mixer(index: int) -> Mixer:
        return softmax if index in full else delta

    found = decoder(config, "qwen3_5", mixer, feed_forward, norm=norm(config))
    extra = msgspec.structs.replace(found.layers[0], mixer=softmax)  # for more tokens at once; inference does without
    ends = bool(config.get("mtp_use_dedicated_embeddings", False))
    count = int(config.get("mtp_num_hidden_layers", 0))
    return msgspec.structs.replace(found, mtp=(extra,) * count, mtp_ends=ends)


FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    spec=spec,
    rules=RULES,
    silent={"qwen3_5_text": {"num_key_value_heads": 4}, "qwen3_5_moe_text": {"num_key_value_heads": 2}},
)
