"""A ledger as JSON and back, formats with fields of their own included: it comes back equal to what went. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import Packed
from firstlight.engine.weights.formats.int8 import Int8
from firstlight.engine.weights.formats.mxfp4 import MxFp4, MxFp4Blocks
from firstlight.engine.weights.formats.nvfp4 import NvFp4
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.source import Source

AnyFormat = Awq | Fp8 | Gptq | Int8 | MxFp4 | MxFp4Blocks | NvFp4 | PackedInt


class _Packed(Packed, frozen=True, gc=False):
    """As it is written: which format it is, the format says itself."""

    format: AnyFormat


class _Source(Source, frozen=True, gc=False):
    packed: _Packed | None = None


class _Ledger(Ledger, frozen=True, kw_only=True):
    sources: dict[str, _Source]


def ledger_of(data: bytes) -> Ledger:
    """The ledger that an engine wrote. Raises `msgspec.MsgspecError` for anything else."""
    found = msgspec.json.decode(data, type=_Ledger)
    fields = {name: getattr(found, name) for name in Ledger.__struct_fields__}
    return Ledger(**{**fields, "sources": {name: _source(one) for name, one in found.sources.items()}})


def _source(found: _Source) -> Source:
    packed = found.packed
    whole = None if packed is None else Packed(packed.name, packed.shape, packed.format, packed.tensors)
    return Source(found.tensor, found.region, found.transpose, found.tied, whole)


def plain(value: Any) -> Any:
    """For encoders: a mapping that makes its entries when asked, as a dict, and a sequence that does, as a list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in an answer")
