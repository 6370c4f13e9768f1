"""MiniMax-01: lightning attention, some layers of softmax attention; what the norm gives is the residual stream."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    TRUNK,
    activation,
    decoder,
    gqa,
    head_dim,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, router
from firstlight.engine.model.families.state_spaces import layer_kinds
from firstlight.engine.model.rules import ignored, rule
from firstlight.engine.model.spec import Blend, LayerSpec, Lightning, Mixer, ModelSpec


def slopes(layer: int, layers: int, heads: int) -> tuple[float, ...]:
    """How fast each head of a layer forgets: a geometric row, slower in later layers."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 / heads * (head + 1)) * factor for head in range(heads))


def blend(config: Config, block: str) -> Blend:
    """How a block's output joins what it read."""
    keep, add = config.get(f"{block}_alpha_factor", 1), config.get(f"{block}_beta_factor", 1)
    return Blend(keep=float(keep), add=float(add))


def spec(config: Config) -> ModelSpec:
    count, heads, size = config.size("num_hidden_layers"), config.size("num_attention_heads"), head_dim(config)
    kinds = layer_kinds(config, "linear_attention", "full_attention")
    regular = ["linear_attention" if index % 2 else "full_attention" for index in range(count)]
    kinds = one_a_layer(config, "layer_types", kinds or regular)
    softmax = gqa(config, rope=rope(config, size, 1e6), window=config.get("sliding_window"))
    moe = mixture(config, router(config), "intermediate_size")
    act, norm, fed = activation(config), rms(config, 1e-5), blend(config, "mlp")
    config.get("block_size")  # how prompts are cut, not what comes out

    def layer(index: int) -> LayerSpec:
        mixer: Mixer = softmax
        joined = blend(config, "full_attn" if kinds[index] == "full_attention" else "linear_attn")
        if kinds[index] == "linear_attention":
            own = slopes(index, count, heads)
            mixer = Lightning(num_heads=heads, head_dim=size, slopes=own, activation=act, eps=1e-6)
        return LayerSpec(mixer=mixer, ffn=moe, mixer_norm=norm, ffn_norm=norm, blends=(joined, fed))

    layers = tuple(layer(index) for index in range(count))
    return decoder(config, "minimax", softmax, moe, norm=norm, layers=layers)


_A, _P = "(model.|)layers.{i}.self_attn.", "layers.{i}.mixer."
LIGHTNING_RULES = (
    rule(_A + "qkv_proj.weight", _P + "qkv.weight"),
    rule(_A + "output_gate.weight", _P + "gate.weight"),
    rule(_A + "norm.weight", _P + "norm.weight"),
    rule(_A + "out_proj.weight", _P + "o.weight"),
    ignored(_A + "(slope_rate|query_decay|key_decay|diagonal_decay)", "recomputed from the configuration"),
)
RULES = TRUNK + ATTENTION + LIGHTNING_RULES + MIXTURE
FAMILY = Family(
    name="minimax", model_types=("minimax",), spec=spec, rules=RULES, silent={"minimax": {"num_key_value_heads": 8}}
)
