"""StarCoder2: LayerNorms and biases, a feed-forward without a gate, an optional window."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, TRUNK, decoder, gqa, in_layers, layer_norm, plain_mlp
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import ModelSpec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("use_bias", True))
    config.only("norm_type", "layer_norm", default="layer_norm")
    config.only("mlp_type", "default", default="default")
    attention = gqa(config, qkv_bias=bias, output_bias=bias, window=config.get("sliding_window"))
    feed_forward = plain_mlp(config, "gelu_pytorch_tanh", bias)
    norm = layer_norm(config, "norm_epsilon")
    return decoder(config, "starcoder2", attention, feed_forward, norm=norm, tie_default=True)


RULES = TRUNK + ATTENTION + in_layers({"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"})
FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    spec=spec,
    rules=RULES,
    silent={"starcoder2": {"num_key_value_heads": 2}},
)
