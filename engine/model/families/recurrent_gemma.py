"""RecurrentGemma (Griffin): two recurrent layers, then one of attention in a window; Gemma's norms and embedding."""

import struct

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation, decoder, gqa, in_layers, rms, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import ENDLESS
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, Mixer, ModelSpec, RgLru


def rounded(value: float) -> float:
    """The nearest number of bfloat16, in which the reference keeps the factor of its embedding."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (found,) = struct.unpack("<f", struct.pack("<I", kept))
    return float(found)


def attention(config: Config) -> Attention:
    heads = config.size("num_attention_heads")
    size, bias = config.size("hidden_size") // heads, bool(config.get("attention_bias", False))
    config.get("head_dim")  # follows from the others
    return gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=rope(config, size, partial=0.5),
        qkv_bias=bias,
        output_bias=True,
        window=int(config.get("attention_window_size", config.get("sliding_window", 2048))),
    )


def spec(config: Config) -> ModelSpec:
    hidden, act = config.size("hidden_size"), activation(config, "hidden_activation", "gelu_pytorch_tanh")
    kinds = list(config.get("block_types", ("recurrent", "recurrent", "attention")))
    for kind in kinds:  # of a period, which is repeated
        if kind not in ("recurrent", "attention"):
            config.unsupported("block_types", kind, "recurrent or attention")
    for key in ("w_init_variance_scale", "final_w_init_variance_scale"):
        config.get(key)  # of training
    width, heads = int(config.get("lru_width", hidden)), config.size("num_attention_heads")
    if width % heads:
        config.refuse("lru_width", width, f"a multiple of num_attention_heads {heads}")
    mixers: dict[str, Mixer] = {
        "attention": attention(config),
        "recurrent": RgLru(width=width, num_heads=heads, activation=act, conv=int(config.get("conv1d_width", 4))),
    }
    feed_forward = MLP(intermediate=config.size("intermediate_size") // 2, activation=act, bias=True)
    cap = config.get("logits_soft_cap", 30.0)
    return decoder(
        config,
        "recurrent_gemma",
        lambda i: mixers[kinds[i % len(kinds)]],
        feed_forward,
        norm=msgspec.structs.replace(rms(config), offset=1.0),
        tie_default=True,
        embed_scale=rounded(hidden**0.5),
        logit_softcap=None if cap is None else float(cap),
        max_positions=int(config.get("max_position_embeddings", ENDLESS)),
    )


_T, _P = "model.layers.{i}.temporal_block.", "layers.{i}.mixer."
RULES = (
    rule("model.embed_tokens.weight", "embed.weight"),
    rule("model.final_norm.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
    *in_layers({"temporal_pre_norm": "mixer_norm", "channel_pre_norm": "ffn_norm"}),
    *in_layers({f"temporal_block.{part}_proj": f"mixer.{part}" for part in "qkvo"}),
    *in_layers({f"mlp_block.{part}_proj": f"ffn.{part}" for part in ("gate", "up", "down")}),
    *in_layers({"linear_x": "mixer.x", "linear_y": "mixer.y", "linear_out": "mixer.o", "conv_1d": "mixer.conv"}, _T),
    rule(_T + "rg_lru.recurrent_param", _P + "decay"),
    *(rule(f"{_T}rg_lru.input_gate_{kind}", f"{_P}input_gate.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_T}rg_lru.recurrent_gate_{kind}", f"{_P}decay_gate.{kind}") for kind in ("weight", "bias")),
)
FAMILY = Family(name="recurrent_gemma", model_types=("recurrent_gemma",), spec=spec, rules=RULES)
