"""A model's spec in words and rows: blocks of layers, the operators they call, the vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from firstlight.engine.model.spec import LayerSpec, ModelSpec, Norm

SAID_RUNS = 4


def layer_rows(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Kinds of layers in the order in which they come, the vision tower's first."""
    towers = [("vision", spec.vision.layers)] if spec.vision is not None else []
    for tower, layers in (*towers, ("text", spec.layers)):
        kinds: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        start = 0
        for layer, group in groupby(layers):
            count = sum(1 for _ in group)
            kinds.setdefault(tuple(_blocks(layer).values()), []).append((start, count))
            start += count
        for blocks, runs in kinds.items():
            found = dict(zip(("mixer", "feed_forward"), blocks, strict=True))
            yield {"tower": tower, "layers": spans(runs), "count": sum(count for _, count in runs), **found}


def spans(runs: Sequence[tuple[int, int]]) -> str:
    """`0`, `0 to 3`, `1 to 2, 4`; of many runs the first two and the last: `3, 7 ... 91 to 92`."""
    said = [span(*run) for run in runs]
    return ", ".join(said) if len(said) <= SAID_RUNS else f"{said[0]}, {said[1]} ... {said[-1]}"


def _blocks(layer: LayerSpec) -> dict[str, str]:
    mixers = [part.mixer.words() for part in layer.whole if part.mixer is not None]
    feed_forwards = [
        block.words() for block in (*(part.ffn for part in layer.whole), layer.shortcut) if block is not None
    ]
    return {"mixer": "; ".join(mixers) or "none", "feed_forward": "; ".join(feed_forwards) or "none"}


def span(start: int, count: int) -> str:
    return str(start) if count == 1 else f"{start} to {start + count - 1}"


def operator_rows(spec: ModelSpec) -> Iterator[dict[str, str]]:
    """The operators a forward needs, and which blocks call them."""
    yield _row("linear", "projections, output head")
    norms = {norm.kind for norm in _norms(spec)}
    if "rms" in norms:
        yield _row("rms_norm", "layers and output")
    if "layer" in norms:
        yield _row("layer_norm", "vision tower" if spec.vision is not None else "layers and output")
    callers: dict[str, dict[str, None]] = {}
    for layer in dict.fromkeys(spec.layers):
        parts = [block for part in layer.whole for block in (part.mixer, part.ffn)]
        for block in (*parts, layer.shortcut):
            for operator in block.operators() if block is not None else ():
                assert block is not None
                callers.setdefault(operator, {})[block.words()] = None
    for operator, blocks in callers.items():
        yield _row(operator, "; ".join(blocks))
    yield _row("sample", f"{spec.vocab_size:,} tokens")


def _norms(spec: ModelSpec) -> Iterator[Norm]:
    layers = spec.layers + (spec.vision.layers if spec.vision is not None else ())
    for layer in dict.fromkeys(part for whole in layers for part in whole.whole):
        for norm in (layer.mixer_norm, layer.ffn_norm, layer.post_mixer_norm, layer.post_ffn_norm):
            if norm is not None:
                yield norm
    yield spec.final_norm


def _row(operator: str, why: str) -> dict[str, str]:
    return {"operator": operator, "for": why}
