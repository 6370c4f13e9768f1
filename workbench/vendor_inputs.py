"""A prompt with pictures by the vendor's own processor in transformers: where its steps are not known here, and to
hold our own steps against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, note, warning
from firstlight.engine.inputs.pictures import Picture
from firstlight.engine.inputs.prepare import Prepared, PreparedRecord, Processor, Span
from firstlight.workbench.compare import deviation
from firstlight.workbench.reference import load_transformers, part_of_transformers, quiet
from firstlight.workbench.report import Draft

PIXEL_LIMIT = 1e-3  # of the largest value: resizing and normalising in float32, in another order
COARSE_LIMIT = 0.03  # ... where the vendor's steps resize in integers by another library: some of 255 steps of colour
UNUSABLE = (ValueError, OSError, KeyError, ImportError, AttributeError)  # what transformers raises for lack of parts


def vendor_processor(directory: str | Path) -> Any:
    """transformers' processor of a checkpoint directory; nothing is downloaded."""
    auto = part_of_transformers("models.auto.processing_auto").AutoProcessor
    with quiet():
        return auto.from_pretrained(directory, local_files_only=True)


def encoded(
    processor: Any, prompt: str | Sequence[Mapping[str, Any]], pictures: Sequence[Picture], chat: bool
) -> tuple[str, list[int], dict[str, NDArray[Any]]]:
    """Text, token ids and picture tensors. Without a chat template, pictures go first unless the prompt places them."""
    if isinstance(prompt, str) and not (chat and processor.chat_template):
        marks = "" if processor.image_token in prompt else processor.image_token * len(pictures)
        text = marks + prompt
    else:
        text = processor.apply_chat_template(_messages(prompt, len(pictures)), add_generation_prompt=True)
    images = [picture.image for picture in pictures]
    found = processor(text=[text], images=images or None, return_tensors="np")
    tensors = {name: np.asarray(value) for name, value in found.items()}
    ids = tensors.pop("input_ids")[0].tolist()
    tensors.pop("attention_mask", None)
    return text, ids, tensors


def prepared(ours: Processor, prompt: str, pictures: Sequence[Picture], chat: bool, refused: Refused) -> Prepared:
    """The same as a `Prepared`, marked as the vendor's; raises `refused` where transformers cannot do it either."""
    try:
        processor = vendor_processor(ours.directory)
        text, ids, tensors = encoded(processor, prompt, pictures, chat)
    except UNUSABLE:
        raise refused from None
    name = type(processor).__name__
    spans = _spans(ids, getattr(processor, "image_token_id", None), len(pictures))
    said = warning(
        "fallback",
        f"{name} of transformers {load_transformers().__version__} made the input: its steps are not known here",
        file=str(ours.directory),
        expected="a processor whose steps are known here, traced constant by constant",
        found=name,
        next="nothing to compare it with: this is the vendor's own result",
    )
    ids_1T = np.array([ids], dtype=np.int64)
    record = PreparedRecord(
        tokenizer_class=ours.tokenizer.class_name,
        tokenizer_file=str(ours.tokenizer.file),
        chat_template_file=None,
        processor_class=name,
        image_processor_class=type(processor.image_processor).__name__,
        constants=(),
        pictures=tuple(picture.record for picture in pictures) if spans else (),
        tokens_per_picture=tuple(sum(count for _, count in runs) for runs in spans),
        findings=(*ours.tokenizer.findings, said),
    )
    return Prepared(
        input_ids=ids_1T,
        attention_mask=np.ones_like(ids_1T),
        tensors=tensors,
        picture_spans=spans,
        text=text,
        record=record,
    )


def _spans(ids: Sequence[int], token: int | None, pictures: int) -> tuple[tuple[Span, ...], ...]:
    """The run of tokens of each picture; none where their number does not tell whose is whose."""
    starts = [i for i, id_ in enumerate(ids) if id_ == token and (not i or ids[i - 1] != token)]
    counts = [next((n for n, id_ in enumerate(ids[i:]) if id_ != token), len(ids) - i) for i in starts]
    if len(starts) == pictures:
        return tuple(((start, count),) for start, count in zip(starts, counts, strict=True))
    if len(starts) == 1 and counts[0] % pictures == 0:  # side by side, and all of one size as far as can be seen
        each = counts[0] // pictures
        return tuple(((starts[0] + i * each, each),) for i in range(pictures))
    return ()


def _messages(prompt: str | Sequence[Mapping[str, Any]], pictures: int) -> list[dict[str, Any]]:
    """Messages as processors take them; of a plain text one user turn, pictures first."""
    if not isinstance(prompt, str):
        return [dict(message) for message in prompt]
    parts: list[dict[str, Any]] = [{"type": "image"}] * pictures
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]


def hold_inputs(
    draft: Draft, ours: Prepared, directory: str | Path, text: str, pictures: Sequence[Picture], chat: bool
) -> None:
    """Checks token ids and picture tensors against those of the vendor's own processor in transformers.

    An engine that is right answers to something else where they differ. Where transformers has no such processor here,
    a note says that nothing was compared.
    """
    try:
        ids, tensors, limit = _theirs(directory, text, pictures, chat)
    except UNUSABLE as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = "the prompt was not held against the vendor's own processor, which transformers cannot make here"
        draft.find(note("not-available", message, file=str(directory), found=why[:200]))
        return
    found = ours.input_ids[0].tolist()
    same = found == ids
    words = f"{len(ids)} tokens" if same else _first_difference(found, ids)
    draft.check("prompt input_ids", same, value=int(not same), limit=0, unit="differences", detail=words)
    if not same:
        draft.find(_wrong_inputs(ours, "input_ids", f"{len(ids)} tokens of the vendor's processor", words))
    for name in sorted(tensors.keys() & ours.tensors.keys()):
        _hold_tensor(draft, ours, name, np.asarray(ours.tensors[name]), tensors[name], limit)


def _hold_tensor(
    draft: Draft, ours: Prepared, name: str, found: NDArray[Any], expected: NDArray[Any], limit: float
) -> None:
    if found.shape != expected.shape:
        apart, words = np.inf, f"{list(found.shape)} instead of {list(expected.shape)}"
    else:
        flat = (found.reshape(1, -1).astype(np.float64), expected.reshape(1, -1).astype(np.float64))
        apart = deviation(*flat).relative
        words = f"{list(found.shape)}, mean-abs {np.abs(flat[0] - flat[1]).mean():.2e}"
    passed = bool(apart <= limit)
    value = float(apart) if np.isfinite(apart) else None
    draft.check(f"prompt {name}", passed, value=value, limit=limit, unit="of scale", detail=words)
    if not passed:
        draft.find(_wrong_inputs(ours, name, f"within {limit:g} of the vendor's", words))


def _theirs(
    directory: str | Path, text: str, pictures: Sequence[Picture], chat: bool
) -> tuple[list[int], dict[str, NDArray[Any]], float]:
    """The vendor's token ids and picture tensors, and how near ours must come to the latter."""
    if pictures:
        processor = vendor_processor(directory)
        _, ids, tensors = encoded(processor, text, pictures, chat)
        exact = type(processor.image_processor).__name__.endswith("Pil")
        return ids, tensors, PIXEL_LIMIT if exact else COARSE_LIMIT
    auto = part_of_transformers("models.auto.tokenization_auto").AutoTokenizer
    with quiet():
        tokenizer = auto.from_pretrained(directory, local_files_only=True)
        if not chat:
            return list(tokenizer(text)["input_ids"]), {}, PIXEL_LIMIT
        turns = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"]), {}, PIXEL_LIMIT


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(ours)} tokens instead of {len(theirs)}"
    return f"token {place} is {ours[place]} instead of {theirs[place]}"


def _wrong_inputs(ours: Prepared, name: str, expected: str, found: str) -> Any:
    pictured = name != "input_ids"
    part = "picture processor" if pictured else "tokenizer or the chat template"
    return fatal(
        "wrong-numbers",
        f"the prompt is not the vendor's: {name} differs, so the {part} is at fault, whatever the model computes",
        file=ours.record.image_processor_class if pictured else ours.record.tokenizer_file,
        tensors=(name,),
        expected=expected,
        found=found,
        next="compare `firstlight preprocess` with the vendor's processor, constant by constant",
    )
