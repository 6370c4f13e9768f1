"""Llama's layout with another number or flag: Arcee, CWM, ERNIE 4.5 (dense), Granite, Helium, InternLM3, Ministral,
Seed-OSS and SmolLM3.

Each row of `KIN` is a model type. A key that only one of them has is read for all, at the value that changes nothing.
"""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    LLAMA,
    activation,
    decoder,
    gqa,
    layer_windows,
    llama4_temperature,
    mlp,
    rms,
    rope,
    rotated_layers,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.spec import Attention, ModelSpec


class Kin(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture assumes where its config.json is silent, and what it never says there."""

    theta: float = 10000.0
    interleaved: bool = False
    eps: float = 1e-6
    head_dim: int | None = None
    tied: bool = False
    act: str = "silu"
    gated: bool = True
    bias: bool = False
    output_bias: bool | None = None  # None: as the other three
    no_rope_interval: int = 0
    full_first_of: int = 0  # the first of so many layers has no window
    scale: float | None = None  # of scores; None: by the width of a head
    rope: dict[str, Any] = {}  # where the file says nothing of positions


KIN = {
    "arcee": Kin(eps=1e-5, act="relu2", gated=False),
    "cwm": Kin(
        theta=1000000.0,
        eps=1e-5,
        head_dim=128,
        full_first_of=4,
        rope={
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "ernie4_5": Kin(theta=500000.0, interleaved=True, eps=1e-5, head_dim=128, tied=True),
    "granite": Kin(scale=1.0),
    "helium": Kin(theta=100000.0, interleaved=True, eps=1e-8, head_dim=128, output_bias=False),
    "internlm3": Kin(eps=1e-5, head_dim=128),
    "ministral": Kin(),
    "ministral3": Kin(
        eps=1e-5,
        head_dim=128,
        rope={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "seed_oss": Kin(head_dim=128, bias=True, output_bias=False),
    "smollm3": Kin(theta=2000000.0, tied=True, no_rope_interval=4),
}


def _windows(config: Config, kin: Kin, rotated: list[bool]) -> list[int | None]:
    window = config.get("sliding_window")
    switch = config.get("use_sliding_window")
    config.get("max_window_layers")  # Qwen's, never used here
    if "layer_types" in config:
        return layer_windows(config, window)
    if switch is not None:  # SmolLM3: only layers without rotation
        return [window if switch and not one else None for one in rotated]
    every = kin.full_first_of
    return [None if every and index % every == 0 else window for index in range(len(rotated))]


def spec(config: Config) -> ModelSpec:
    kin = KIN[config.need("model_type")]
    shared = config.get("use_bias", config.get("bias", False))  # ERNIE, InternLM3: of all blocks
    bias = bool(config.get("attention_bias", config.get("qkv_bias", shared or kin.bias)))
    output_bias = bool(config.get("attention_out_bias", bias if kin.output_bias is None else kin.output_bias))
    own = config.size("hidden_size") // config.size("num_attention_heads")
    size = int(config.stated("head_dim", absent=kin.head_dim) or own)
    if kin.rope:
        silent_rope(config, **kin.rope)
    positions = rope(config, size, kin.theta, kin.interleaved, read_elsewhere=("llama_4_scaling_beta",))
    rotated = rotated_layers(config, kin.no_rope_interval)
    windows = _windows(config, kin, rotated)

    def attention(index: int) -> Attention:
        return gqa(
            config,
            head_dim=size,
            scale=float(config.get("attention_multiplier", kin.scale or size**-0.5)),
            rope=positions if rotated[index] else None,
            window=windows[index],
            qkv_bias=bias,
            output_bias=output_bias,
            temperature=llama4_temperature(config),
        )

    feed_forward = mlp(
        config,
        activation=activation(config, default=kin.act),
        gated=kin.gated,
        bias=bool(config.get("mlp_bias", shared)),
    )
    return decoder(
        config,
        str(config.get("model_type")),
        attention,
        feed_forward,
        norm=rms(config, kin.eps),
        layer={"residual_scale": float(config.get("residual_multiplier", 1.0))},
        tie_default=kin.tied,
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        scales_pictures=True,
        logit_scale=1.0 / config.positive("logits_scaling", config.get("logits_scaling", 1.0)),
    )


RULES = LLAMA
FAMILY = Family(
    name="llama_kin",
    model_types=tuple(KIN),
    spec=spec,
    rules=RULES,
    silent={
        "cwm": {"num_key_value_heads": 8, "sliding_window": 8192},
        "ernie4_5": {"num_key_value_heads": 2},
        "internlm3": {"num_key_value_heads": 2},
        "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "ministral3": {"num_key_value_heads": 8},
        "seed_oss": {"num_key_value_heads": 8},
        "smollm3": {"num_key_value_heads": 4},
    },
    classes={"internlm3": "LlamaForCausalLM"},
)
