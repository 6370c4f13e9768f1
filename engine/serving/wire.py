"""A trace over HTTP: its arguments and its outcome as safetensors bytes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.serving.api import EngineInfo
from firstlight.engine.serving.request import SamplingParams

IMAGE, GIVEN = "image:", "given:"


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of `generate`; pictures are data URLs."""

    prompt: str | tuple[int | dict[str, Any], ...]
    pictures: tuple[str, ...] = ()
    params: SamplingParams = SamplingParams()
    chat: bool = True


def read_generation(body: bytes) -> Generation:
    """The arguments of `generate` from a body; raises `Refused` (bad-request)."""
    try:
        asked = msgspec.json.decode(body, type=Generation)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(
            fatal("bad-request", "the body cannot be used", expected="JSON", found=str(error), next="send JSON")
        ) from None
    if any(not url.startswith("data:") for url in asked.pictures):
        raise Refused(
            fatal(
                "bad-image",
                "a picture that is not sent along",
                expected="data: URLs",
                found=asked.pictures[0][:80],
                next="send bytes",
            )
        )
    return asked


def trace_body(
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    tensors: Mapping[str, np.ndarray] | None,
    inputs: Mapping[str, np.ndarray] | None,
) -> bytes:
    """The arrays of a trace as one body."""
    arrays = {"input_ids": np.ascontiguousarray(input_ids)}
    if attention_mask is not None:
        arrays["attention_mask"] = np.ascontiguousarray(attention_mask)
    for prefix, group in ((IMAGE, tensors), (GIVEN, inputs)):
        arrays |= {prefix + name: np.ascontiguousarray(value) for name, value in (group or {}).items()}
    return safetensors.numpy.save(arrays)


def trace_query(layers: tuple[int, int] | None, steps: int, blocks: bool) -> dict[str, str]:
    """The numbers of a trace as a query."""
    query = {"steps": str(steps), "blocks": str(int(blocks))}
    return query if layers is None else {**query, "layers": f"{layers[0]}:{layers[1]}"}


def trace_arguments(body: bytes, query: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `trace` from a body and a query; raises `Refused` (bad-golden)."""
    try:
        arrays = safetensors.numpy.load(body)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise _bad("a safetensors body", str(error)) from None
    if "input_ids" not in arrays:
        raise _bad("input_ids", ", ".join(sorted(arrays)) or "nothing")
    try:
        low, _, high = query["layers"].partition(":") if "layers" in query else ("", "", "")
        layers = (int(low), int(high)) if low else None
        steps, blocks = int(query.get("steps", "0")), query.get("blocks", "0") == "1"
    except ValueError as error:
        raise _bad("numbers in the query", str(error)) from None
    return {
        "input_ids": arrays["input_ids"],
        "attention_mask": arrays.get("attention_mask"),
        "tensors": _group(arrays, IMAGE),
        "inputs": _group(arrays, GIVEN),
        "layers": layers,
        "steps": steps,
        "blocks": blocks,
    }


def refuse_large_trace(info: EngineInfo, arguments: Mapping[str, Any], limit_bytes: int, limit_tokens: int) -> None:
    """Refuses a trace that would hold up the engine, all of whose positions are one step, or whose answer would not
    fit: logits and hidden states of every position, float32."""
    low, high = arguments["layers"] or (0, info.num_layers)
    positions = int(np.prod(np.shape(arguments["input_ids"])))
    if positions > limit_tokens:
        raise Refused(
            fatal(
                "bad-request",
                f"a trace of {positions:,} positions is too long for a served engine",
                expected=f"at most {limit_tokens:,} positions, rows times tokens",
                found=f"{positions:,}",
                next="send fewer rows or tokens at a time, or verify on one rank, which needs no server",
            )
        )
    width = (info.vocab_size if high else 0) + (high - low + 1) * info.hidden * (2 if arguments["blocks"] else 1)
    if positions * width * 4 > limit_bytes:
        raise Refused(
            fatal(
                "bad-request",
                f"a trace of {positions:,} positions would be {positions * width * 4:,} bytes",
                expected=f"at most {limit_bytes:,} bytes",
                found=f"{positions * width * 4:,} bytes",
                next="send fewer rows or tokens, or fewer --layers",
            )
        )


def _group(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _bad(expected: str, found: str) -> Refused:
    return Refused(
        fatal(
            "bad-golden",
            "the body of a trace cannot be used",
            expected=expected,
            found=found,
            next="send what EngineClient.trace sends",
        )
    )
