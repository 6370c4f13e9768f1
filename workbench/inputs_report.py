"""What a prompt and pictures became, as a report: text, ids, tensors, constants with their sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.inputs.prepare import Prepared
from firstlight.engine.weights.files.safetensors_file import Tagged
from firstlight.workbench.report import Draft, Report


def inputs_report(checkpoint: str, prepared: Prepared, out: str | None = None) -> Report:
    """The report of the rung `preprocess`."""
    draft = Draft("preprocess", Path(checkpoint).name)
    count = int(prepared.input_ids.size)
    draft.check("the prompt has tokens", count > 0, value=count, unit="tokens")
    for index, spans in enumerate(prepared.picture_spans):
        start, tokens = spans[0][0], sum(count for _, count in spans)
        draft.check(
            f"picture {index + 1} fills placeholders",
            tokens > 0,
            value=tokens,
            unit="tokens",
            detail=f"from position {start}",
        )
    draft.metric("prompt_tokens", count, "tokens")
    if out is not None:
        draft.metric("file", out, "")
    draft.table(
        "tensors",
        (
            {
                "name": name,
                "dtype": array.tag if isinstance(array, Tagged) else str(array.dtype),
                "shape": " x ".join(map(str, (array.bits if isinstance(array, Tagged) else array).shape)),
                "total_bytes": (array.bits if isinstance(array, Tagged) else array).nbytes,
            }
            for name, array in prepared.arrays().items()
        ),
    )
    add_inputs(draft, prepared)
    return draft.close()


def add_inputs(draft: Draft, prepared: Prepared) -> None:
    """Adds the rendered prompt, its ids, pictures and constants to a report."""
    record = prepared.record
    draft.find(record.findings)
    draft.table("prompt", [{"text": prepared.text, "token_ids": prepared.input_ids[0].tolist()}])
    draft.table("pictures", picture_rows(prepared))
    draft.table("constants", (msgspec.to_builtins(constant) for constant in record.constants))


def picture_rows(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Each picture: what was done to it, and where its tokens are in the prompt."""
    for picture, spans in zip(prepared.record.pictures, prepared.picture_spans, strict=True):
        tokens = sum(count for _, count in spans)
        yield {**msgspec.to_builtins(picture), "first_position": spans[0][0], "tokens": tokens, "runs": len(spans)}
