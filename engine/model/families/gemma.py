"""Gemma 1 to 3 (text) and VaultGemma: norms with (1 + weight), embeddings scaled by the root of the width.

Gemma 2 norms what blocks give as well as what they take, caps scores and logits softly, and gives every other layer a
window. Gemma 3 norms queries and keys instead of capping; five of six layers have a window and a rotary base of their
own. VaultGemma is Gemma 2 without the norms behind the blocks.
"""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    PRE,
    QK_NORM,
    SANDWICH,
    SANDWICH_NORMS,
    activation,
    decoder,
    gqa,
    in_layers,
    layer_windows,
    mlp,
    rope,
    rope_of_kind,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import Attention, ModelSpec, Norm


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What tells the generations apart; the numbers are defaults where config.json is silent."""

    norms: tuple[str, ...] = SANDWICH
    qk_norm: bool = False
    window_every: int = 0  # the last of so many layers sees everything; 0: all do
    theta: float = 10000.0
    local_theta: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None


KINDS = {
    "gemma": Kind(norms=PRE),
    "gemma2": Kind(window_every=2, score_cap=50.0, logit_cap=30.0),
    "gemma3_text": Kind(qk_norm=True, window_every=6, theta=1000000.0, local_theta=10000.0),
    "vaultgemma": Kind(norms=PRE, window_every=2, score_cap=50.0, logit_cap=30.0),
}


GEMMA3 = {  # what the releases with pictures leave out of their text's configuration
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}


def _windows(config: Config, kind: Kind) -> list[int | None]:
    window = config.stated("sliding_window", absent=4096)
    every = int(config.get("sliding_window_pattern", kind.window_every))
    config.get("_sliding_window_pattern")  # the same, where transformers wrote the file
    config.get("cache_implementation")
    if not kind.window_every:
        return [None] * config.size("num_hidden_layers")
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if (index + 1) % every else None for index in range(config.size("num_hidden_layers"))]


def _activation(config: Config) -> str:
    """`hidden_activation` supersedes `hidden_act`, in which plain "gelu" always meant the tanh form."""
    config.get("hidden_act")
    if "hidden_activation" in config or config.get("hidden_act") in (None, "gelu"):
        return activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return activation(config, "hidden_act")


def _score_cap(config: Config, kind: Kind) -> float | None:
    """The soft cap of scores; the reference has none where queries and keys are normed, whatever the file states."""
    cap: float | None = config.stated("attn_logit_softcapping", absent=kind.score_cap)
    if cap is None or not kind.qk_norm:
        return cap
    config.warn(
        "config-invalid",
        "attn_logit_softcapping is stated, and not applied: the reference norms queries and keys instead",
        expected="null",
        found=str(cap),
        next="check config.json against the model's release",
    )
    return None


def spec(config: Config) -> ModelSpec:
    model_type = str(config.get("model_type", "gemma3_text"))
    kind = KINDS[model_type]
    norm = Norm(eps=float(config.get("rms_norm_eps", 1e-6)), offset=1.0)
    windows, bias = _windows(config, kind), bool(config.get("attention_bias", False))
    feed_forward = mlp(config, activation=_activation(config))
    config.only("use_bidirectional_attention", False, default=False)
    size = int(config.get("head_dim", 256))

    cap = _score_cap(config, kind)

    def attention(index: int) -> Attention:
        layer = "full_attention" if windows[index] is None else "sliding_attention"
        return gqa(
            config,
            head_dim=size,
            scale=float(config.get("query_pre_attn_scalar", size if model_type == "gemma" else 256)) ** -0.5,
            rope=rope_of_kind(config, size, layer, kind.theta, kind.local_theta)
            if kind.local_theta
            else rope(config, size, kind.theta),
            softcap=cap,
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm if kind.qk_norm else None,
        )

    return decoder(
        config,
        model_type,
        attention,
        feed_forward,
        norm=norm,
        norms=kind.norms,
        tie_default=True,
        embed_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.stated("final_logit_softcapping", absent=kind.logit_cap),
    )


def norm_names(config: Config) -> tuple[WeightRule, ...]:
    """`post_attention_layernorm` is in front of the feed-forward in Gemma 1, behind the attention in 2 and 3."""
    if KINDS[str(config.get("model_type", "gemma3_text"))].norms is SANDWICH:
        return SANDWICH_NORMS
    second = "post_attention_layernorm" if config.need("model_type") == "gemma" else "pre_feedforward_layernorm"
    return in_layers({"input_layernorm": "mixer_norm", second: "ffn_norm"})


RULES = ENDS + ATTENTION + QK_NORM + DENSE
FAMILY = Family(
    name="gemma",
    model_types=tuple(KINDS),
    spec=spec,
    rules=RULES,
    silent={
        "gemma2": {"num_key_value_heads": 4},
        "gemma3_text": GEMMA3,
        "vaultgemma": {"num_key_value_heads": 4},
    },
    left_out=norm_names,
)
