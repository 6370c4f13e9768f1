"""Readings that vision-language families share: encoder layers, positions of pictures, tied heads, and their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ACTIVATIONS
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import (
    MLP,
    ActivationStep,
    Attention,
    AxialRope,
    Chain,
    LayerSpec,
    LinearStep,
    MergeStep,
    ModelSpec,
    Norm,
    NormStep,
    PatchTower,
)

DEFAULT_THETA = 10000.0  # of rotations, where the configuration is silent


def layer(
    norm: Norm,
    heads: int,
    hidden: int,
    intermediate: int,
    activation: str,
    *,
    gated: bool = False,
    qkv_bias: bool = True,
    output_bias: bool = True,
    mlp_bias: bool = True,
    qk_norm: Norm | None = None,
) -> LayerSpec:
    """One layer of a vision encoder: attention over whole pictures and a feed-forward, each behind a norm."""
    if hidden < heads:
        raise ValueError(f"num_attention_heads = {heads} of a hidden_size of {hidden}")
    return LayerSpec(
        mixer=Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            scale=(hidden // heads) ** -0.5,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            causal=False,
            qk_norm=qk_norm,
            qk_norm_over="heads" if qk_norm is None else "width",
        ),
        ffn=MLP(intermediate=intermediate, activation=activation, gated=gated, bias=mlp_bias),
        mixer_norm=norm,
        ffn_norm=norm,
    )


def tower_config(config: Config, *kinds: str) -> Config:
    """`vision_config`, refused where it names another tower: one whose name begins with none of `kinds`."""
    written = config.raw.get("vision_config")
    if written is not None and not isinstance(written, Mapping):
        config.refuse("vision_config", written, "a configuration of its own")
    found = config.sub("vision_config")
    name = found.get("model_type", kinds[0])
    if not isinstance(name, str) or not name.startswith(kinds):
        found.unsupported("model_type", name, " or ".join(kinds))
    return found


def feature_layers(config: Config, default: int, layers: int, *, several: bool = False) -> tuple[int, ...]:
    """The states of the tower that features come from: 0 is what enters its first layer, -1 what leaves the last."""
    given = config.stated("vision_feature_layer", absent=default)
    chosen = tuple(given) if isinstance(given, list) else (given,)
    if len(chosen) != 1 and not several:
        config.unsupported("vision_feature_layer", given, "one layer")
    if not chosen or any(type(one) is not int or not -layers - 1 <= one <= layers for one in chosen):
        config.refuse("vision_feature_layer", given, f"whole numbers of {-layers - 1} to {layers}")
    return chosen


def kernel_of(config: Config, key: str, default: float) -> int:
    """Patches of a side that a ratio such as 1/2 puts together."""
    ratio = config.positive(key, config.get(key, default))
    kernel = round(1 / ratio)
    if kernel < 1 or abs(kernel * ratio - 1) > 1e-6:
        config.refuse(key, ratio, "one by a whole number")
    return kernel


def count(config: Config, key: str, default: int, *older: str) -> int:
    """A positive whole number; `default` is the architecture's where the file is silent, `older` are former names."""
    named = next((name for name in (key, *older) if name in config), None)
    for name in (key, *older):
        config.get(name)
    return default if named is None else config.size(named)


def heads_of(config: Config, hidden: int, heads: int, multiple: int = 1) -> int:
    """The number of heads, refused where they do not divide the width into heads of a multiple of `multiple`."""
    if hidden % heads or hidden // heads % multiple:
        config.refuse("num_heads", heads, f"a divisor of {hidden} that leaves heads of a multiple of {multiple}")
    return heads


def acts(config: Config, key: str, default: str) -> str:
    """An activation by the kernels' name, refused where there is none."""
    return ACTIVATIONS[config.only(key, *ACTIVATIONS, default=default)]


def square(config: Config, key: str, default: int) -> int:
    """A size that may be written twice, as height and width, which must agree."""
    value = config.get(key, default)
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            config.unsupported(key, value, "the same height and width")
        value = value[0]
    if type(value) is not int or not 0 < value <= 1 << 20:
        config.refuse(key, value, "a positive whole number, at most 1,048,576")
    return int(value)


def axial(
    config: Config,
    *,
    split: bool = False,
    layout: Literal["halves", "pairs"] = "halves",
) -> AxialRope:
    """Rotations by row and column."""
    fields: Mapping[str, Any] = config.get("rope_parameters") or {}
    for key, value in fields.items():
        known = {"rope_type": ("axial", "default"), "type": ("axial", "default")}.get(key)
        if (known is not None and value not in known) or (known is None and key != "rope_theta"):
            config.unsupported(f"rope_parameters.{key}", value, "axial, with a rope_theta")
    theta = config.positive("rope_theta", fields.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)))
    return AxialRope(theta=theta, split=split, layout=layout)


def with_sections(config: Config, text: ModelSpec, default: tuple[int, ...], *, interleaved: bool = False) -> ModelSpec:
    """The decoder with positions of frame, row and column; `config` has its rotary keys, `default` is silent files'."""
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    given = fields.get("mrope_section", default)
    if not isinstance(given, list | tuple) or not all(isinstance(size, int) and size >= 0 for size in given):
        config.refuse("mrope_section", given, "whole numbers")
    sections = tuple(given)
    asks = fields.get("mrope_interleaved")
    if asks is not None and bool(asks) != interleaved:
        config.unsupported("mrope_interleaved", asks, f"{interleaved}, as this family has it")

    def placed(one: LayerSpec) -> LayerSpec:
        rope, mixer = getattr(one.mixer, "rope", None), one.mixer
        if rope is None or mixer is None:
            return one
        half = rope.dim // 2
        if len(sections) != 3 or (sum(sections) != half if not interleaved else sum(sections) > half):
            config.refuse("mrope_section", list(sections), f"three sections that are {half} frequencies together")
        new = msgspec.structs.replace(rope, sections=sections, sections_interleaved=interleaved)
        return msgspec.structs.replace(one, mixer=msgspec.structs.replace(mixer, rope=new))

    return msgspec.structs.replace(text, layers=tuple(placed(one) for one in text.layers))


def joined(config: Config, family: str, text: ModelSpec, vision: PatchTower, tie_default: bool = False) -> ModelSpec:
    """The whole model."""
    plain = plain_head(config, text)
    return msgspec.structs.replace(plain, family=family, vision=vision, tied_head=tied(config, text, tie_default))


def plain_head(config: Config, text: ModelSpec) -> ModelSpec:
    """The decoder with the output head of a model that sees, which is a matrix whatever the text alone has.

    What is left out so in the reference (a scale, a soft cap) changes no token's rank, only how far they are apart.
    """
    left_out = {"a scale": text.logit_scale != 1.0, "a soft cap": text.logit_softcap is not None}
    if names := " and ".join(name for name, is_there in left_out.items() if is_there):
        config.warn(
            "config-invalid",
            f"the text's configuration gives its logits {names}, which the reference leaves out of models that see",
            expected="a plain output head",
            found=f"{text.family} with {names} of logits",
            next="greedy answers are the same; for sampling, choose a temperature that makes up for it",
        )
    return msgspec.structs.replace(text, logit_scale=1.0, logit_softcap=None, head_bias=False)


def text_alone(config: Config, text: ModelSpec) -> ModelSpec:
    """The text model of a configuration that describes no tower, though the architecture has one; that is said."""
    config.warn(
        "config-invalid",
        "config.json describes no vision tower; the text alone is counted and run",
        expected="vision_config",
        found="absent",
        next="take config.json from the publisher's repository",
    )
    return text


def tied(config: Config, text: ModelSpec, default: bool = False) -> bool:
    """The tie flag may stand at either level; the text's own word counts, and a contradiction is reported."""
    outer, inner = config.get("tie_word_embeddings"), config.sub("text_config").raw.get("tie_word_embeddings")
    if outer is not None and inner is not None and bool(outer) != bool(inner):
        config.warn(
            "conflicting-flag",
            "tie_word_embeddings differs between the top level and text_config; a head in the checkpoint decides",
            expected=f"text_config: {inner}",
            found=f"top level: {outer}",
            next="see the ledger for where the output head came from",
        )
        return True
    return bool(text.tied_head or (default if outer is None and inner is None else outer))


def image_token(config: Config, default: int | None = None, *first: str) -> int:
    """The id of the token whose embedding a picture's features replace, under a family's own names or the usual."""
    keys = (*first, "image_token_id", "image_token_index")
    if default is not None and not any(key in config for key in keys):
        return default
    found = config.need(*keys)
    for key in ("video_token_id", "video_token_index", "vision_start_token_id", "vision_end_token_id"):
        config.get(key)  # marks around pictures are tokens like others
    if type(found) is not int or found < 0:
        config.refuse("image_token_id", found, "the id of a token")
    return int(found)


def two_layers(width: int, kernel: int, hidden: int, out: int, norm: Norm | None, activation: str = "gelu") -> Chain:
    """Norm each patch, put those of a kernel side by side, two linear layers: the merger of Qwen-VL."""
    steps = (
        *((NormStep(name="norm", norm=norm),) if norm is not None else ()),
        MergeStep(patches=kernel),
        LinearStep(name="0", width=hidden),
        ActivationStep(activation=activation),
        LinearStep(name="1", width=out),
    )
    return Chain(width=width, steps=steps)


def both(theirs: str, ours: str) -> tuple[WeightRule, ...]:
    """A weight and a bias."""
    return tuple(rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))


CLIP_LAYER = {  # names of an encoder layer in CLIP and SigLIP -> ours
    "layer_norm1": "mixer_norm",
    "layer_norm2": "ffn_norm",
    "self_attn.q_proj": "mixer.q",
    "self_attn.k_proj": "mixer.k",
    "self_attn.v_proj": "mixer.v",
    "self_attn.out_proj": "mixer.o",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}


def named(prefix: str, names: Mapping[str, str], into: str = "vision.") -> tuple[WeightRule, ...]:
    """Weights and biases below `prefix`, under our names below `into`."""
    return tuple(one for theirs, ours in names.items() for one in both(prefix + theirs, into + ours))


def fused_qkv(theirs: str, ours: str) -> tuple[WeightRule, ...]:
    """Queries, keys and values in one tensor."""
    return tuple(rule(f"{theirs}.{kind}", *(f"{ours}.{part}.{kind}" for part in "qkv")) for kind in ("weight", "bias"))


def norm_of(eps: float, kind: str = "layer") -> Norm:
    """LayerNorm with a bias, or RMSNorm without."""
    return Norm(kind="layer", eps=eps, bias=True) if kind == "layer" else Norm(eps=eps)
