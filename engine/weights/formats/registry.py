"""Which storage format a configuration announces. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, TypeGuard

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.spec import Param
from firstlight.engine.weights.formats.fp8_block import Fp8Block
from firstlight.engine.weights.formats.plain import Plain


class StoredFormat(Protocol):
    """What planning asks of a format."""

    def layer_key(self, layer: int) -> Hashable:
        """Equal for layers whose parameters are stored alike."""

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether every cut of `param` into shards of `shape` takes the same bytes, wherever it starts."""

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Bytes of the part of `param` that has `shape` and begins at `start` (None: at its beginning)."""


def stored_format(config: Mapping[str, Any], dtype: str) -> StoredFormat:
    """The format of a raw `config.json`; refused by name when sizes of it are not known."""
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (_mapping(text).get("quantization_config"))
    if not quantization:
        return Plain(dtype)
    method, block = _mapping(quantization).get("quant_method"), _mapping(quantization).get("weight_block_size")
    if method == "fp8" and _is_block(block):
        kept = _mapping(quantization).get("modules_to_not_convert") or ()
        return Fp8Block(dtype, (block[0], block[1]), tuple(str(name) for name in kept))
    what = _what(quantization)
    raise Refused(
        fatal(
            "unsupported-format",
            f"quantization {method!r} is not known here: {what}",
            file="config.json",
            expected="no quantization_config, or quant_method fp8 with weight_block_size",
            found=what,
            next="write engine/weights/formats/<format>.py; sizes are not guessed",
        )
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_block(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def _what(quantization: object) -> str:
    if not isinstance(quantization, Mapping):
        return f"quantization_config is {type(quantization).__name__}, not an object"
    return ", ".join(f"{key} = {value}" for key, value in quantization.items() if isinstance(value, str | int | float))
