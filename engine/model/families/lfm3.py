"""LFM3: LFM2 with norms on both sides of a block, windows between, and a gate on each head of the attention."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    SANDWICH,
    decoder,
    gqa,
    head_dim,
    in_layers,
    one_a_layer,
    rope_of_kind,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.lfm2 import RULES as LFM2_RULES
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import MLP, Attention, Mixer, ModelSpec, Norm, ShortConv

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
KINDS = ("conv", "sliding_attention", "full_attention")


def kinds_of(config: Config) -> list[str]:
    count, kinds = config.size("num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i % 4 == 2 else "conv" if i % 4 or not i else KINDS[1] for i in range(count)]
    return one_a_layer(config, "layer_types", kinds, *KINDS)


def attention(config: Config, kind: str, norm: Norm) -> Attention:
    bias, size = bool(config.get("attention_bias", False)), head_dim(config)
    window = config.stated("sliding_window", absent=256)
    return gqa(
        config,
        rope=rope_of_kind(config, size, kind, 1e6 if kind == "full_attention" else 1e4),
        qk_norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        window=window if kind == "sliding_attention" else None,
        gate="head" if config.get("use_attention_gate", True) else None,
    )


def spec(config: Config) -> ModelSpec:
    silent_rope(config, **ROPE)
    norm = Norm(eps=config.positive("norm_eps", config.get("norm_eps", 1e-5)))
    width, bias = config.size("hidden_size"), bool(config.get("conv_bias", False))
    kinds = kinds_of(config)
    mixers: dict[str, Mixer] = {"conv": ShortConv(width=width, conv=int(config.get("conv_L_cache", 7)), bias=bias)}
    mixers |= {kind: attention(config, kind, norm) for kind in KINDS[1:] if kind in kinds}
    feed_forward = MLP(intermediate=config.size("intermediate_size"), activation="silu")
    tied = bool(config.get("tie_embedding", config.get("tie_word_embeddings", True)))
    places = SANDWICH if config.get("use_sandwich_norm", True) else SANDWICH[:2]
    return decoder(config, "lfm3", lambda i: mixers[kinds[i]], feed_forward, norm=norm, norms=places, tied_head=tied)


RULES: tuple[WeightRule, ...] = (
    *LFM2_RULES,
    *in_layers({"post_operator_norm": "post_mixer_norm", "post_ffn_norm": "post_ffn_norm"}),
    *in_layers({"self_attn.o_proj": "mixer.o", "self_attn.(gate_proj|g_proj)": "mixer.gate"}),
    *in_layers({f"self_attn.{part}_norm": f"mixer.{part}_norm" for part in "qk"}),
)
FAMILY = Family(name="lfm3", model_types=("lfm3",), spec=spec, rules=RULES, silent={"lfm3": {"num_key_value_heads": 4}})
