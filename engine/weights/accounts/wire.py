"""A ledger as JSON and back, formats with fields of their own included: it comes back equal to what went. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

import msgspec

from firstlight.engine.weights.formats.announced import every_format
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.source import Source


class _Packed(Packed, frozen=True, gc=False):
    """As it is written: which format it is, the format says itself."""

    format: msgspec.Raw  # type: ignore[assignment]  # read once, however many weights have it


class _Source(Source, frozen=True, gc=False):
    packed: _Packed | None = None


class _Ledger(Ledger, frozen=True, kw_only=True):
    sources: dict[str, _Source]


def ledger_of(data: bytes) -> Ledger:
    """The ledger that an engine wrote. Raises `msgspec.MsgspecError` for anything else."""
    found = msgspec.json.decode(data, type=_Ledger)
    formats = _Formats()
    fields = {name: getattr(found, name) for name in Ledger.__struct_fields__}
    return Ledger(**{**fields, "sources": {name: _source(one, formats) for name, one in found.sources.items()}})


def _source(found: _Source, formats: _Formats) -> Source:
    packed = found.packed
    whole = None if packed is None else Packed(packed.name, packed.shape, formats[bytes(packed.format)], packed.tensors)
    return Source(found.tensor, found.region, found.transpose, found.tied, whole)


class _Formats(dict[bytes, Format]):
    """Formats by what is written of them; equal ones are one."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(Union[every_format()])  # noqa: UP007 (they are no list that is written here)

    def __missing__(self, written: bytes) -> Format:
        found: Format = self._decoder.decode(written)
        return self.setdefault(written, found)


def plain(value: Any) -> Any:
    """For encoders: a mapping that makes its entries when asked, as a dict, and a sequence that does, as a list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in an answer")
