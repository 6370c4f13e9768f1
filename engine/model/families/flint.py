"""Flint: sinks beside the keys of windows and of every fourth layer, which sees everything and does not rotate."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import in_layers, layer_windows
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.sigmoid_common import RULES as KIN_RULES
from firstlight.engine.model.families.sigmoid_common import Kin, sigmoid_decoder
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import ModelSpec

KIN = Kin(eps=1e-6, head_dim=128, window=513, nope=True, router={"correction_bias": False, "eps": 0.0})


def spec(config: Config) -> ModelSpec:
    count, window = config.size("num_hidden_layers"), config.stated("sliding_window", absent=KIN.window)
    windows = [None if index < 2 or index % 4 == 1 or index == count - 1 else window for index in range(count)]
    if "layer_types" in config:
        windows = layer_windows(config, window)
    dense, step = set(config.get("mlp_only_layers", [0, 1])), int(config.get("decoder_sparse_step", 1))
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    return sigmoid_decoder(config, "flint", KIN, windows, sparse, sinks=True)


SINKS = rule("(model.|)layers.{i}.self_attn.(sinks|softmax_offset)", "layers.{i}.mixer.sinks")
RULES = (*KIN_RULES, SINKS, *in_layers({"post_attention_layernorm": "ffn_norm"}))
FAMILY = Family(
    name="flint",
    model_types=("flint",),
    spec=spec,
    rules=RULES,
    silent={"flint": {"num_key_value_heads": 4, "shared_expert_intermediate_size": 1024}},
)
