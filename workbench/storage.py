"""In which storage formats a checkpoint holds its weights, as the account found them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from firstlight.engine.weights.accounts.lots import Lot, Sources
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.names.patterns import grouped, numbers, with_numbers
from firstlight.engine.weights.source import Source

_name, _shape, _format = attrgetter("name"), attrgetter("shape"), attrgetter("format")


def storage_rows(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Quantized weights by format and pattern: how many, in how many tensors, of how many elements and bytes."""
    sources: Mapping[str, Source] = ledger.sources
    if isinstance(ledger.sources, Sources):
        sources = ledger.sources.singles
        yield from (_lot_row(lot.format, lot) for lot in ledger.sources.lots if lot.format is not None)
    packs = (source.packed for source in sources.values())
    weights = {packed.tensors[0].name: packed for packed in packs if packed is not None}
    for pattern, group in grouped(weights.values(), _name).items():
        formats = {id(format_): format_ for format_ in map(_format, group)}
        for label in dict.fromkeys(format_.describe() for format_ in formats.values()):
            alike = {key for key, format_ in formats.items() if format_.describe() == label}
            own = group if len(alike) == len(formats) else [packed for packed in group if id(packed.format) in alike]
            names = list(map(_name, own))
            yield {"format": label, "weights": with_numbers(pattern, numbers(pattern, names)), **_sizes(own)}


def _lot_row(format_: Format, lot: Lot) -> dict[str, Any]:
    """The row of weights that are all alike."""
    first = lot.source(0).packed
    assert first is not None
    count = len(lot)
    return {
        "format": format_.describe(),
        "weights": with_numbers(lot.weights, lot.mains.numbers),
        "count": count,
        "tensors": count * len(first.tensors),
        "elements": count * math.prod(lot.shape),
        "total_bytes": count * first.nbytes,
        "parts": _parts(first),
    }


def _parts(first: Packed) -> str:
    return ", ".join(f"{tensor.name.rpartition('.')[2]} {tensor.dtype}" for tensor in first.tensors)


def _sizes(group: list[Packed]) -> dict[str, Any]:
    """Counts of a group; of weights of one shape and one spelling the first is measured."""
    first = group[0]
    kinds = set(zip(map(_shape, group), map(id, map(_format, group)), strict=True))
    of = [(first, len(group))] if len(kinds) == 1 else [(packed, 1) for packed in group]
    return {
        "count": len(group),
        "tensors": sum(len(packed.tensors) * count for packed, count in of),
        "elements": sum(math.prod(packed.shape) * count for packed, count in of),
        "total_bytes": sum(packed.nbytes * count for packed, count in of),
        "parts": _parts(first),
    }
