"""Weights that stay packed on a rank: codes and scales side by side, as they are stored. No torch.

Experts in MXFP4 are kept so where an operator multiplies by them (`moe_mxfp4`) and a rank's share begins and ends
between groups. Everything else that is stored packed is unpacked while it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from firstlight.engine.model.spec import Param
from firstlight.engine.parallel.placement import Local
from firstlight.engine.weights.formats.mxfp4 import GROUP, MxFp4
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.ledger import Ledger, Region
from firstlight.engine.weights.source import Source

SCALE = "_scale"  # what the names of scales end with, behind that of the weight


class Kept(NamedTuple):
    """One stored tensor of a weight that stays packed: where it goes, as a parameter, and what is read of it."""

    param: Param
    local: Local
    tensor: TensorInfo
    region: Region


def kept_packed(held: Sequence[tuple[Param, Local]], ledger: Ledger) -> dict[str, tuple[Kept, ...]]:
    """By name of the parameters that stay packed, the codes and scales that take their place.

    A layer's experts are kept together or not at all: one operator multiplies by all of them.
    """
    groups: dict[str, list[tuple[Param, Local]]] = {}
    for param, local in held:
        if param.role == "expert" and len(param.shape) == 2:
            groups.setdefault(param.home.rpartition(".")[0], []).append((param, local))
    found: dict[str, tuple[Kept, ...]] = {}
    for group in groups.values():
        if all(_is_whole(ledger.sources[param.name], local) for param, local in group):
            found.update((param.name, tuple(_parts(param, local, ledger))) for param, local in group)
    return found


def _is_whole(source: Source, local: Local) -> bool:
    """Whether the share of a weight in MXFP4 is rows of whole groups."""
    if source.packed is None or not isinstance(source.packed.format, MxFp4) or source.transpose:
        return False
    rows, (start, stop, _) = source.cut(local.bounds)[-2:]
    return rows[2] == 1 and start % GROUP == 0 and stop % GROUP == 0


def _parts(param: Param, local: Local, ledger: Ledger) -> Iterable[Kept]:
    source = ledger.sources[param.name]
    assert source.packed is not None
    box = tuple((start, stop) for start, stop, _ in source.cut(local.bounds))
    for suffix, (info, bounds) in zip(("", SCALE), source.packed.bounds(box), strict=True):
        shape = tuple(stop - start for start, stop in bounds)[-2:]
        stored = msgspec.structs.replace(
            param,
            name=param.name + suffix,
            shape=info.shape[-2:],
            storage=param.home + suffix,
            dtype=info.dtype,
        )
        yield Kept(stored, Local(bounds[-2:], shape), info, tuple((start, stop, 1) for start, stop in bounds))
