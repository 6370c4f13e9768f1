"""GPT-OSS: sinks beside the keys, windows on every other layer, experts with biases and a limit on both halves.

Gate and up of an expert take turns in one tensor, stored [experts, in, out].
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    TRUNK,
    decoder,
    gqa,
    layer_windows,
    rms,
    rope,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import ROUTER, mixture, router
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, ModelSpec
from firstlight.kernels.gated_activation.names import named

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _windows(config: Config) -> list[int | None]:
    window = config.stated("sliding_window", absent=128)
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if index % 2 == 0 else None for index in range(config.size("num_hidden_layers"))]


def spec(config: Config) -> ModelSpec:
    windows, bias = _windows(config), bool(config.get("attention_bias", True))
    size = int(config.get("head_dim", 64))
    config.get("initial_context_length"), config.get("experts_per_token")  # other names of what is read elsewhere
    config.only("hidden_act", "silu", default="silu")
    silent_rope(config, **ROPE)
    positions = rope(config, size, 150000.0)

    def attention(index: int) -> Attention:
        return gqa(
            config,
            head_dim=size,
            scale=size**-0.5,
            rope=positions,
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
        )

    limit = config.positive("swiglu_limit", config.get("swiglu_limit", 7.0))
    alpha = config.positive("swiglu_alpha", config.get("swiglu_alpha", 1.702))
    moe = mixture(
        config,
        router(config, score_chosen=True, bias=True),
        "intermediate_size",
        activation=named("clamped", limit, alpha, 1.0),
        bias=True,
    )
    return decoder(config, "gpt_oss", attention, moe, norm=rms(config, 1e-5))


_B = "(model.|)layers.{i}.mlp.experts."
_E = "layers.{i}.ffn.experts.{e}."
EXPERTS = (
    rule(
        _B + "gate_up_proj",
        _E + "gate.weight",
        _E + "up.weight",
        split_dim=1,
        interleaved=True,
        stacked=True,
        transpose=True,
    ),
    rule(_B + "gate_up_proj_bias", _E + "gate.bias", _E + "up.bias", interleaved=True, stacked=True),
    rule(_B + "down_proj", _E + "down.weight", stacked=True, transpose=True),
    rule(_B + "down_proj_bias", _E + "down.bias", stacked=True),
    *(  # as exporters of quantized weights take them apart
        rule(f"{_B}{{e}}.{part}_proj.{kind}", f"{_E}{part}.{kind}")
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    ),
)
SINKS = (rule("(model.|)layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks"),)
RULES = TRUNK + ATTENTION + SINKS + ROUTER + EXPERTS
FAMILY = Family(
    name="gpt_oss", model_types=("gpt_oss",), spec=spec, rules=RULES, silent={"gpt_oss": {"num_key_value_heads": 8}}
)
