"""Inputs of our own for a comparison: a prompt, random tokens as long as the layers reach, and positions far apart."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import note, warning
from firstlight.engine.inputs.pictures import Picture, open_picture
from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.model.spec import CompressedAttention, LayerSpec, ModelSpec
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.cases import ANSWER
from firstlight.workbench.contradictions import TEXT_LEVELS
from firstlight.workbench.golden import Arrays
from firstlight.workbench.report import Draft
from firstlight.workbench.side_files import has_chat_template
from firstlight.workbench.vendor_inputs import hold_inputs

PROMPT = "Describe what you see and hear on a walk through a forest after the rain, in a few words."
PROMPT_SEEING = "What is in this picture? Answer in a few words."
SEED = 20240229
LOGIT_VALUES = 32_000_000  # tokens are chosen so that one set of logits has about this many values at most
LONGEST = 256  # tokens of a row, where no layer reaches farther
AROUND = 16  # tokens around pictures
BEYOND = 8  # tokens behind the end of a window
MULTIPLIES = 5e11  # of one run, for which rows are made longer than that
FAR = 32  # tokens at positions far apart
POSITIONS = "position_ids"
RANKS = (2, 4, 8)  # that a vocabulary may be divided over
WINDOW = re.compile(r"(sliding|attention|attn|local).*(window|chunk)|window_size")  # keys that say how far a layer sees


def inputs_of(
    draft: Draft, checkpoint: Checkpoint, spec: ModelSpec, prompt: str | None, pictures: Sequence[str | Path]
) -> dict[str, Arrays]:
    """Named inputs under the names of golden files. What cannot be prepared is a warning, unless it was asked for."""
    found: dict[str, Arrays] = {}
    wanted = prompt is not None or bool(pictures)
    if wanted or "tokenizer.json" in checkpoint.side_files:
        try:
            found["prompt"] = _prompt(draft, checkpoint, spec, prompt, pictures)
        except Refused as refused:
            if wanted:
                raise
            first = refused.findings[0]
            draft.find(
                warning(
                    "missing-side-file", f"no prompt was compared: {first.message}", file=first.file, next=first.next
                )
            )
    elements = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    reach = reach_of(spec, checkpoint.config)
    length = row_length(spec, reach, elements)
    _say_unreached(draft, reach, length)
    found["random"] = random_inputs(spec, length)
    found |= picture_inputs(spec, elements) | edge_inputs(spec, elements)
    far = far_inputs(spec, length)
    return found if far is None else {**found, "far": far}


def _prompt(
    draft: Draft, checkpoint: Checkpoint, spec: ModelSpec, prompt: str | None, pictures: Sequence[str | Path]
) -> Arrays:
    processor = Processor.open(checkpoint.directory)
    opened = [open_picture(path) for path in pictures]
    if spec.vision is not None and not opened and prompt is None:
        opened = [colour_card()]
    text = prompt or (PROMPT_SEEING if opened else PROMPT)
    chat = has_chat_template(checkpoint.directory)
    prepared = processor.prepare(text, opened, chat)
    hold_inputs(draft, prepared, checkpoint.directory, text, opened, chat)
    return {name: np.asarray(value) for name, value in prepared.arrays().items()}


def colour_card() -> Picture:
    """A picture of our own in which every pixel, channel, row and column differs: a swap of any two shows."""
    from PIL import Image

    width, height = 96, 64
    y, x = np.mgrid[0:height, 0:width]
    red, green = x * 255 // (width - 1), y * 255 // (height - 1)
    blue = ((x // 8 + y // 8) % 2) * 160 + (x * y) % 64
    buffer = io.BytesIO()
    Image.fromarray(np.stack((red, green, blue), axis=-1).astype(np.uint8)).save(buffer, "PNG")
    return open_picture(buffer.getvalue())


def reach_of(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """How many tokens a row needs for every layer to leave something out, or to stretch something; 0 where none does.

    Windows by the configuration too: a spec that has lost one would not show it.
    """
    found = [reach for layer in spec.layers for part in layer.whole for reach in _reaches(part)]
    levels = [config, *(level for name in TEXT_LEVELS if isinstance(level := config.get(name), Mapping))]
    found += [value for level in levels for key, value in level.items() if WINDOW.search(key) and type(value) is int]
    return max((reach for reach in found if reach < spec.max_positions), default=0)


def _reaches(layer: LayerSpec) -> Iterator[int]:
    """Windows and chunks of keys, and the length behind which frequencies are stretched."""
    for name in ("window", "chunk"):
        yield getattr(layer.mixer, name, None) or 0
    yield from _trained(layer)


def _trained(layer: LayerSpec) -> Iterator[int]:
    """The length behind which frequencies are others."""
    rope = getattr(layer.mixer, "rope", None)
    if rope is not None and rope.scaling is not None and rope.scaling.kind in ("dynamic", "longrope"):
        yield rope.max_positions if rope.scaling.kind == "dynamic" else rope.scaling.original_max_positions


def edge_inputs(spec: ModelSpec, elements: int) -> dict[str, Arrays]:
    """Rows of the last length with one set of frequencies and the first with another: longer rows know one alone."""
    edges = {edge for layer in spec.layers for part in layer.whole for edge in _trained(part)}
    draw, allowed = np.random.default_rng(SEED + 2), _tokens(spec)
    found: dict[str, Arrays] = {}
    for edge in sorted(edge for edge in edges if edge + ANSWER < spec.max_positions):
        for length in (edge, edge + 1) if _is_cheap(spec, edge, elements) else ():
            ids = draw.choice(allowed, (1, length)).astype(np.int64)
            found[f"row{length}"] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return found


def _tokens(spec: ModelSpec) -> NDArray[np.int64]:
    """Every token but the placeholder of pictures."""
    every = np.arange(spec.vocab_size)
    return every if spec.vision is None else every[every != spec.vision.image_token_id]


def row_length(spec: ModelSpec, reach: int, elements: int) -> int:
    """Tokens of the longer random row: beyond what layers reach, where a model of so many weights gets there soon."""
    most = max(1, spec.max_positions - ANSWER)
    usual = min(LONGEST, max(32, LOGIT_VALUES // (2 * spec.vocab_size)))
    wanted = max(usual, reach + BEYOND)
    return min(most, wanted if _is_cheap(spec, wanted, elements) else usual)


def _is_cheap(spec: ModelSpec, length: int, elements: int) -> bool:
    """Whether a model of so many weights soon ends with a row."""
    return 2 * length * elements <= MULTIPLIES and length * spec.vocab_size <= LOGIT_VALUES


def _say_unreached(draft: Draft, reach: int, length: int) -> None:
    if length <= reach:
        draft.find(
            note(
                "not-available",
                f"what layers leave out or stretch beyond {reach:,} tokens was not compared",
                expected=f"rows of more than {reach:,} tokens",
                found=f"{length:,} tokens, so that a run of this model ends soon",
                next="give a longer --prompt, or a golden file of longer rows",
            )
        )


def random_inputs(spec: ModelSpec, length: int) -> Arrays:
    """Two rows of random tokens, the second shorter.

    The shorter row begins with the first and the last token of the vocabulary, and with those on both sides of where
    ranks divide it.
    """
    draw, allowed = np.random.default_rng(SEED), _tokens(spec)
    ids = np.stack([draw.choice(allowed, length, replace=length > len(allowed)) for _ in range(2)]).astype(np.int64)
    shorter = length - length // 4
    ends = [row for row in vocabulary_ends(spec.vocab_size) if row in allowed][: shorter // 2]
    ids[1, : len(ends)] = ends
    return {"input_ids": ids, "attention_mask": _behind(ids, shorter)}


def picture_inputs(spec: ModelSpec, elements: int) -> dict[str, Arrays]:
    """Rows of random tokens around random pictures: two in the first, one in the second; empty where none can be made.

    Where pictures are told by their grids, the second stands upright and the others lie. A large model, or one of few
    positions, is given one alone.
    """
    vision = spec.vision
    one = vision.blank() if vision is not None else {}
    if vision is None or not one:
        return {}
    count = sum(vision.counts(one))
    length = 2 * count + AROUND
    several = length + ANSWER <= spec.max_positions and _is_cheap(spec, 2 * length, elements)
    pictures = [one, _turned(one), one] if several else [one]
    tensors = {name: np.concatenate([picture[name] for picture in pictures]) for name in one}
    draw, allowed = np.random.default_rng(SEED + 3), _tokens(spec)
    ids = draw.choice(allowed, (2, length if several else min(spec.max_positions, count + AROUND))).astype(np.int64)
    for row, start in ((0, 1), (0, count + 4), (1, 2))[: len(pictures)]:
        ids[row, start : start + count] = vision.image_token_id
    pixels = draw.standard_normal(tensors["pixel_values"].shape).astype(np.float32)
    mask = _behind(ids, ids.shape[1] - 2 if not several else count + 5)
    return {"pictures": {"input_ids": ids, "attention_mask": mask, **tensors, "pixel_values": pixels}}


def _turned(picture: Arrays) -> Arrays:
    """A picture that is told by its grid with rows for columns."""
    return {name: value[:, [0, 2, 1]] if name == "image_grid_thw" else value for name, value in picture.items()}


def _behind(ids: NDArray[np.int64], shorter: int) -> NDArray[np.int64]:
    """The mask of two rows, of which the second has `shorter` tokens."""
    mask = np.ones_like(ids)
    mask[1, shorter:] = 0
    return mask


def vocabulary_ends(vocabulary: int) -> list[int]:
    """The first and the last row of a vocabulary, and of every rank's share of it, few ranks first."""
    found = [0, vocabulary - 1]
    for ranks in RANKS:
        for start in range(-(-vocabulary // ranks), vocabulary, -(-vocabulary // ranks)):
            found += [start - 1, start]
    return list(dict.fromkeys(found))


def far_inputs(spec: ModelSpec, length: int) -> Arrays | None:
    """A row of tokens whose positions lie far apart, up to the model's last; None where positions are not given so.

    Those are told for text alone, and count for layers that rotate keys, or learned what stands where. Layers that
    count keys instead (windows, chunks, blocks, linear attention) see neighbours however far their positions are.
    """
    if spec.max_positions <= length or not _tells_positions(spec):
        return None
    draw = np.random.default_rng(SEED + 1)
    last = spec.max_positions - 1
    drawn = np.unique([0, last, *np.geomspace(1, last, FAR // 2).astype(np.int64), *draw.integers(1, last, FAR)])
    positions = drawn[np.linspace(0, len(drawn) - 1, min(FAR, len(drawn))).astype(np.int64)][None]
    ids = draw.choice(_tokens(spec), positions.shape).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), POSITIONS: positions}


def _tells_positions(spec: ModelSpec) -> bool:
    mixers = [part.mixer for layer in spec.layers for part in layer.whole]
    counts = any(getattr(mixer, name, None) for mixer in mixers for name in ("chunk", "blocks", "indexer"))
    if counts or any(isinstance(mixer, CompressedAttention) for mixer in mixers):
        return False
    return bool(spec.learned_positions) or any(getattr(mixer, "rope", None) is not None for mixer in mixers)
