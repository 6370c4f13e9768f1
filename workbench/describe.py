"""A model's spec in words and rows: blocks of layers, the operators they call, the vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from firstlight.engine.model.spec import MLA, MLP, Attention, LayerSpec, Mixer, ModelSpec, MoE, Norm, Rope
from firstlight.workbench.render.words import number


def mixer_words(mixer: Mixer) -> str:
    """`GQA, 9 query and 3 key/value heads of 64, rope 10,000` and the like."""
    if isinstance(mixer, MLA):
        kind = f"MLA, {mixer.num_heads} heads, latent {mixer.kv_lora_rank}+{mixer.rope_dim}"
    elif mixer.num_heads == mixer.num_kv_heads:
        kind = f"MHA, {mixer.num_heads} heads of {mixer.head_dim}"
    else:
        kind = f"GQA, {mixer.num_heads} query and {mixer.num_kv_heads} key/value heads of {mixer.head_dim}"
    parts = [kind]
    if isinstance(mixer, Attention):
        parts += [f"window {mixer.window:,}"] if mixer.window else []
        parts += [f"softcap {number(mixer.softcap)}"] if mixer.softcap else []
        parts += ["QK-norm"] if mixer.qk_norm else []
        parts += ["QKV bias"] if mixer.qkv_bias else []
        parts += ["sinks"] if mixer.sinks else []
        parts += [] if mixer.causal else ["not causal"]
    if mixer.rope is not None:
        parts.append(rope_words(mixer.rope))
    return ", ".join(parts)


def rope_words(rope: Rope) -> str:
    """`rope 500,000 (llama3 x 8)`."""
    scaling = f" ({rope.scaling.kind} x {number(rope.scaling.factor)})" if rope.scaling else ""
    return f"rope {number(rope.theta)}{scaling}" + (" interleaved" if rope.interleaved else "")


def ffn_words(ffn: MLP | MoE) -> str:
    """`MLP 1,536 silu gated` or `MoE, 8 of 256 experts of 2,048, sigmoid, 1 shared`."""
    if isinstance(ffn, MLP):
        return f"MLP {ffn.intermediate:,} {ffn.activation}" + (" gated" if ffn.gated else "")
    router = ffn.router
    groups = f", {router.topk_groups} of {router.num_groups} groups" if router.num_groups > 1 else ""
    shared = f", shared {ffn.shared.intermediate:,}" if ffn.shared else ""
    experts = f"{router.top_k} of {ffn.num_experts} experts of {ffn.intermediate:,}"
    return f"MoE, {experts}, {router.scoring}{groups}{shared}"


def layer_rows(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Runs of equal layers, the vision tower's first."""
    towers = [("vision", spec.vision.layers)] if spec.vision is not None else []
    for tower, layers in (*towers, ("text", spec.layers)):
        start = 0
        for layer, group in groupby(layers):
            count = sum(1 for _ in group)
            yield {"tower": tower, "layers": span(start, count), **_blocks(layer)}
            start += count


def _blocks(layer: LayerSpec) -> dict[str, str]:
    return {"mixer": mixer_words(layer.mixer), "feed_forward": ffn_words(layer.ffn)}


def span(start: int, count: int) -> str:
    return str(start) if count == 1 else f"{start} to {start + count - 1}"


def operator_rows(spec: ModelSpec) -> Iterator[dict[str, str]]:
    """The operators a forward needs, and what for."""
    mixers = list(dict.fromkeys(layer.mixer for layer in spec.layers))
    ffns = list(dict.fromkeys(layer.ffn for layer in spec.layers))
    mlps = [f for f in ffns if isinstance(f, MLP)] + [f.shared for f in ffns if isinstance(f, MoE) and f.shared]
    moes = [f for f in ffns if isinstance(f, MoE)]
    yield _row("linear", "projections, output head")
    norms = {norm.kind for norm in _norms(spec)}
    if "rms" in norms:
        yield _row("rms_norm", "layers and output")
    if "layer" in norms:
        yield _row("layer_norm", "vision tower" if spec.vision is not None else "layers and output")
    ropes = [mixer.rope for mixer in mixers if mixer.rope is not None]
    if ropes:
        yield _row("rotary", "; ".join(dict.fromkeys(rope_words(rope) for rope in ropes)))
    yield _row("attention", "; ".join(dict.fromkeys(mixer_words(mixer) for mixer in mixers)))
    yield _row("write_cache", "keys and values of every token")
    if mlps or moes:
        activations = dict.fromkeys([mlp.activation for mlp in mlps if mlp.gated] + [moe.activation for moe in moes])
        if activations:
            yield _row("gated_activation", ", ".join(activations))
    for moe in moes:
        yield _row("router_topk", ffn_words(moe))
        yield _row("moe", f"{moe.num_experts} experts")
    yield _row("sample", f"{spec.vocab_size:,} tokens")


def _norms(spec: ModelSpec) -> Iterator[Norm]:
    layers = spec.layers + (spec.vision.layers if spec.vision is not None else ())
    for layer in dict.fromkeys(layers):
        for norm in (layer.mixer_norm, layer.ffn_norm, layer.post_mixer_norm, layer.post_ffn_norm):
            if norm is not None:
                yield norm
    yield spec.final_norm


def _row(operator: str, why: str) -> dict[str, str]:
    return {"operator": operator, "for": why}
