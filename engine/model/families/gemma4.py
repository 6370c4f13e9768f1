"""Gemma 4 (text): wider heads where layers see everything, whose keys may be their values and of which only the
fastest frequencies turn; inputs of a layer's own; last layers over the keys of earlier ones; a learned factor.
"""

from typing import Any

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    POST,
    QK_NORM,
    SANDWICH,
    SANDWICH_NORMS,
    activation,
    decoder,
    gqa,
    layer_windows,
    mlp,
    rms,
    rope_of_kind,
    silent_rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.gemma4_experts import BESIDE, experts
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import (
    Attention,
    DenseAndExperts,
    FeedForward,
    ModelSpec,
    Norm,
    PerLayerGate,
    PerLayerInputs,
)


def _windows(config: Config) -> list[int | None]:
    window, count = config.size("sliding_window"), config.size("num_hidden_layers")
    if "layer_types" in config:
        return [*layer_windows(config, window)[:-1], None]  # the last sees everything whatever the file says
    return [window if (index + 1) % 6 and index + 1 < count else None for index in range(count)]


def _wide(config: Config, index: int) -> tuple[int, int]:
    """Width and number of key heads of a layer that sees everything."""
    own: dict[str, Any] = config.get("per_layer_config", {}).get(str(index), {})
    size = own.get("head_dim", config.get("global_head_dim", 512))
    shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", False) else None
    return int(size), int(own.get("num_key_value_heads", shared or config.size("num_key_value_heads")))


def _owners(config: Config, windows: list[int | None]) -> list[int | None]:
    """Of the last layers, the layer whose keys and values they attend to: the last before them that sees as far."""
    shared, count = int(config.get("num_kv_shared_layers", 0)), len(windows)
    if not 0 <= shared < count:
        config.refuse("num_kv_shared_layers", shared, f"fewer than the {count} layers")
    first = count - shared
    last = {window is None: index for index, window in enumerate(windows[:first])}
    if len(last) < len({window is None for window in windows}):
        config.refuse("num_kv_shared_layers", shared, "a layer of each kind in front of those that share")
    return [None if index < first else last[windows[index] is None] for index in range(count)]


def _per_layer(
    config: Config, layers: int, norm: Norm, act: str
) -> tuple[PerLayerInputs, PerLayerGate] | tuple[None, None]:
    """The inputs that every layer has of its own, and what a layer does with them; neither where they have no width."""
    width = int(config.get("hidden_size_per_layer_input", 256))
    rows = int(config.get("vocab_size_per_layer_input", 262_144))
    if not width:
        return None, None
    inputs = PerLayerInputs(layers=layers, width=width, vocab_size=rows, norm=norm)
    return inputs, PerLayerGate(width=width, activation=act, norm=norm)


ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


def spec(config: Config) -> ModelSpec:
    silent_rope(config, **ROPE)
    config.only("use_bidirectional_attention", "vision", None, default=None)
    norm, windows, bias = rms(config), _windows(config), bool(config.get("attention_bias", False))
    owners, act = _owners(config, windows), activation(config, "hidden_activation", "gelu_pytorch_tanh")
    feed_forward = mlp(config, activation=act)
    wide = 2 if config.get("use_double_wide_mlp", False) else 1
    wider = msgspec.structs.replace(feed_forward, intermediate=feed_forward.intermediate * wide)
    beside = experts(config, norm, act)
    inputs, gate = _per_layer(config, len(windows), norm, act)

    def attention(index: int) -> Attention:
        near = windows[index] is not None
        narrow = int(config.get("head_dim", 256)), config.size("num_key_value_heads")
        size, kv_heads = narrow if near else _wide(config, index)
        return gqa(
            config,
            head_dim=size,
            num_kv_heads=kv_heads,
            scale=1.0,
            rope=rope_of_kind(config, size, "sliding_attention" if near else "full_attention", 1000000.0, 10000.0),
            window=windows[index],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm,
            v_norm=None if owners[index] is not None else Norm(eps=norm.eps, weight=False),
            keys_as_values=owners[index] is None and not near and bool(config.get("attention_k_eq_v", False)),
            keys_of=owners[index],
        )

    def fed(index: int) -> FeedForward:
        dense = feed_forward if owners[index] is None else wider
        return dense if beside is None else DenseAndExperts(dense=dense, experts=beside, norm=norm)

    return decoder(
        config,
        "gemma4",
        attention,
        fed,
        norm=norm,
        norms=SANDWICH if beside is None else ("mixer_norm", *POST),
        layer={"output_scale": True, "per_layer": gate},
        per_layer=inputs,
        tie_default=True,
        embed_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def by_layers(config: Config) -> tuple[WeightRule, ...]:
    """Names that mean another place beside experts; keys and values of layers that attend to others' all the same."""
    found: list[WeightRule] = list(BESIDE if config.get("enable_moe_block", False) else ())
    for index, owner in enumerate(_owners(config, _windows(config))):
        if owner is not None:
            name = f"(model.|)layers.{index}.self_attn.(k_proj|v_proj|k_norm|v_norm)."
            reason = f"layer {index} attends to the keys and values of layer {owner}"
            found += [ignored(name + kind, reason) for kind in ("weight", "bias")]
    return tuple(found)


_L = "(model.|)layers.{i}."
_INPUTS = (
    rule("(model.|)embed_tokens_per_layer.weight", "per_layer.embed.weight"),
    rule("(model.|)per_layer_model_projection.weight", "per_layer.project.weight"),
    rule("(model.|)per_layer_projection_norm.weight", "per_layer.norm.weight"),
    rule(_L + "per_layer_input_gate.weight", "layers.{i}.per_layer.gate.weight"),
    rule(_L + "per_layer_projection.weight", "layers.{i}.per_layer.project.weight"),
    rule(_L + "post_per_layer_input_norm.weight", "layers.{i}.per_layer.norm.weight"),
)
SCALE = rule(_L + "layer_scalar", "layers.{i}.output_scale")
RULES = (*ENDS, *ATTENTION, *QK_NORM, *DENSE, *SANDWICH_NORMS, *_INPUTS, SCALE)
FAMILY = Family(
    name="gemma4",
    model_types=("gemma4_text",),
    spec=spec,
    rules=RULES,
    silent={"gemma4_text": {"num_key_value_heads": 4}},
    left_out=by_layers,
)
