"""What an engine and the reference are both asked when there is no golden file: inputs, results and the noise floor."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import note, warning
from firstlight.engine.inputs.pictures import Picture, open_picture
from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.cases import Case, Rules
from firstlight.workbench.compare import Deviation, deviation
from firstlight.workbench.golden import Arrays, Golden
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft
from firstlight.workbench.side_files import has_chat_template
from firstlight.workbench.streamed import AnyReference, StreamedReference, open_reference

PROMPT = "Describe what you see and hear on a walk through a forest after the rain, in a few words."
PROMPT_SEEING = "What is in this picture? Answer in a few words."
SEED = 20240229
GENERATED = 8
LOGIT_VALUES = 4_000_000  # tokens are chosen so that one set of logits has about this many values


def reference_cases(
    draft: Draft,
    checkpoint: Checkpoint,
    rules: Rules,
    asked: Mapping[str, Arrays],
    progress: Progress,
    streamed: bool | None = None,
    trust_remote_code: bool = False,
) -> tuple[AnyReference, list[Case]]:
    """The reference and a case for each of the inputs `asked` (`inputs_of`), with the reference's own noise.

    `streamed`: whether it runs layer by layer (None: if it would not fit), for which no tokens are generated.
    """
    dtype = rules.dtype
    progress("reference", 0, 1, "models")
    reference = open_reference(checkpoint, streamed=streamed, trust_remote_code=trust_remote_code)
    in_layers = isinstance(reference, StreamedReference)
    if in_layers:
        message = "the reference runs layer by layer, so no generated tokens are compared"
        draft.find(note("not-available", message, next="run it whole where it fits"))
    rounded = None if dtype == "F32" else open_reference(checkpoint, dtype, streamed=in_layers)
    cases = []
    for index, (name, inputs) in enumerate(asked.items()):
        progress("reference", index, len(asked), "inputs")
        found = reference.run(inputs, generate=GENERATED if name == "prompt" else 0)
        free, forced = _noise(reference, rounded, inputs, found)
        golden = Golden.of({**inputs, **found}, f"transformers {reference.version}, {name}")
        cases.append(rules.case(golden, name=name, floor=free, forced_floor=forced))
        worst = max(map(cases[-1].measure, free.values()))
        how = "another summation order" if rounded is None else f"{dtype} instead of F32"
        draft.metric(f"{name}_noise_floor", worst, "of scale", f"the reference against itself, {how}; largest")
        draft.metric(f"{name}_tokens", int(cases[-1].golden.mask.sum()), "tokens")
    progress("reference", len(asked), len(asked), "inputs")
    return reference, cases


def _noise(
    reference: AnyReference, rounded: AnyReference | None, inputs: Arrays, found: Arrays
) -> tuple[dict[str, Deviation], dict[str, Deviation]]:
    """The reference's deviation from itself by name: free running, and from its own inputs layer by layer.

    In float32 another order of summation; in a narrower dtype the whole computation in that dtype.
    """
    free = reference.again(inputs) if rounded is None else rounded.run(inputs)
    forced = reference.again(inputs, found) if rounded is None else rounded.forced(inputs, found)
    mask = Golden.of({**inputs, **found}, "reference").mask
    names = [name for name in found if name != "generated"]
    return (
        {name: _apart(free[name], found[name], mask) for name in names},
        {name: _apart(forced[name], found[name], mask) for name in names if name != "image_features"},
    )


def _apart(again: NDArray[Any], first: NDArray[Any], mask: NDArray[np.bool_]) -> Deviation:
    real = (again[mask], first[mask]) if first.shape[:2] == mask.shape else (again, first)
    return deviation(*real)


def inputs_of(
    draft: Draft, checkpoint: Checkpoint, spec: ModelSpec, prompt: str | None, pictures: Sequence[str | Path]
) -> dict[str, Arrays]:
    """Named inputs under the names of golden files. What cannot be prepared is a warning, unless it was asked for."""
    found: dict[str, Arrays] = {}
    wanted = prompt is not None or bool(pictures)
    if wanted or "tokenizer.json" in checkpoint.side_files:
        try:
            found["prompt"] = _prompt(checkpoint, spec, prompt, pictures)
        except Refused as refused:
            if wanted:
                raise
            first = refused.findings[0]
            draft.find(
                warning(
                    "missing-side-file", f"no prompt was compared: {first.message}", file=first.file, next=first.next
                )
            )
    found["random"] = random_inputs(spec, with_picture="prompt" not in found)
    return found


def _prompt(checkpoint: Checkpoint, spec: ModelSpec, prompt: str | None, pictures: Sequence[str | Path]) -> Arrays:
    processor = Processor.open(checkpoint.directory)
    opened = [open_picture(path) for path in pictures]
    if spec.vision is not None and not opened and prompt is None:
        opened = [colour_card()]
    text = prompt or (PROMPT_SEEING if opened else PROMPT)
    prepared = processor.prepare(text, opened, has_chat_template(checkpoint.directory))
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


def random_inputs(spec: ModelSpec, with_picture: bool) -> Arrays:
    """Two rows of random tokens, the second shorter; with a random picture in the first if that is wanted."""
    draw = np.random.default_rng(SEED)
    longest = min(256, spec.max_positions, max(32, LOGIT_VALUES // (2 * spec.vocab_size)))
    allowed = np.arange(spec.vocab_size)
    vision = spec.vision if with_picture else None
    if spec.vision is not None:
        allowed = allowed[allowed != spec.vision.image_token_id]
    if vision is not None:
        tensors = vision.blank()
        placeholders = sum(vision.counts(tensors))
        longest = min(spec.max_positions, max(longest, placeholders + 16))
    ids = draw.choice(allowed, (2, longest)).astype(np.int64)
    mask = np.ones_like(ids)
    mask[1, longest - longest // 4 :] = 0
    found: dict[str, NDArray[Any]] = {"input_ids": ids, "attention_mask": mask}
    if vision is not None:
        ids[0, 1 : 1 + placeholders] = vision.image_token_id
        pixels = draw.standard_normal(tensors["pixel_values"].shape).astype(np.float32)
        found |= {**tensors, "pixel_values": pixels}
    return found
