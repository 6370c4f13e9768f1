"""Which storage format a configuration announces. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

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
    quantization = config.get("quantization_config") or (text.get("quantization_config") if text else None)
    if not quantization:
        return Plain(dtype)
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method == "fp8" and block:
        return Fp8Block(dtype, (block[0], block[1]), tuple(quantization.get("modules_to_not_convert") or ()))
    raise Refused(
        fatal(
            "unsupported-format",
            f"quantization {method!r} is not known here: {_what(quantization)}",
            file="config.json",
            expected="no quantization_config, or quant_method fp8 with weight_block_size",
            found=_what(quantization),
            next="write engine/weights/formats/<format>.py; sizes are not guessed",
        )
    )


def _what(quantization: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in quantization.items() if isinstance(value, str | int | float))
