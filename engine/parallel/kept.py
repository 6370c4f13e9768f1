"""Weights that stay packed on a rank: codes and scales side by side, as they are stored. No torch.

A weight is kept so where an operator multiplies by its codes (`Format.packing`), nothing but a product reads it, and a
rank's share begins and ends between blocks. Everything else that is stored packed is unpacked while it is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from firstlight.engine.model.spec import Param
from firstlight.engine.parallel.placement import Local
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, WHOLE, Axis, Format, Packed, Packing
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.ledger import Ledger, Region
from firstlight.engine.weights.source import Source

SCALE = "_scale"  # what the names of scales end with, behind that of the weight
SCALES = frozenset(("F32", "BF16", "F16", "U8", "F8_E8M0"))
# Weights that are read by products alone, by the last part of their name; what a block reads otherwise is unpacked.
PRODUCTS = frozenset(("qkv", "o", "q", "q_a", "q_b", "kv", "kv_a", "g", "gate", "up", "gate_up", "down", "in", "o_b"))
ROLES = frozenset(("expert", "attention", "mlp"))  # of weights that may stay packed
UNWANTED = "as it is chosen for this device, or asked for (--packed)"
Wish = Literal["auto", "always", "never"]
WISHES: tuple[Wish, ...] = ("auto", "always", "never")
Residency = Literal["resident", "streamed", "experts"]  # which weights are in memory when: engine/weights/residency.py
RESIDENCIES: tuple[Residency, ...] = ("resident", "streamed", "experts")


class Kept(NamedTuple):
    """One stored tensor of a weight that stays packed: where it goes, as a parameter, and what is read of it.

    `said`: the weight, where beside its codes stands what it should be.
    """

    param: Param
    local: Local
    tensor: TensorInfo
    region: Region
    packing: Packing | None  # of codes
    said: Packed | None = None


class Share(NamedTuple):
    """A rank's [start, stop) in rows and columns of a weight with so many, in a format."""

    format: Format
    codes: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    shape: tuple[int, int]


def kept_roles(wish: Wish, device_type: str) -> tuple[frozenset[str], str]:
    """The roles of weights that stay packed where they can, and why these.

    On CPUs a linear layer reads numbers faster than it unpacks codes, every step anew; of experts only those that
    tokens chose are unpacked.
    """
    if wish == "never":
        return frozenset(), "everything is unpacked when it is read, as asked for"
    if wish == "always":
        return ROLES, "whatever an operator can multiply by stays packed, as asked for"
    if device_type == "cpu":
        return frozenset(("expert",)), "experts stay packed; linear layers are unpacked, which CPUs multiply by faster"
    return ROLES, "whatever an operator can multiply by stays packed"


def kept_packed(
    held: Sequence[tuple[Param, Local]], ledger: Ledger, roles: Collection[str]
) -> tuple[dict[str, tuple[Kept, ...]], dict[str, str]]:
    """By name of the parameters that stay packed, the codes and scales that take their place; of others of these
    roles, what keeps them from it.

    Parameters that share an allocation, and all experts of a layer, are kept together or not at all: one operator
    multiplies by all of them.
    """
    found: dict[str, tuple[Kept, ...]] = {}
    hindered: dict[str, str] = {}
    for homes in together(held, roles):
        words = {home: _hindrance(group, ledger) for home, group in homes.items()}
        first = next(filter(None, words.values()), "")
        for home, param, local in ((home, *one) for home, group in homes.items() for one in group):
            if first:
                hindered[param.name] = words[home] or f"kept as what it is multiplied with is: {first}"
            else:
                found[param.name] = tuple(_parts(param, local, ledger))
    return found, hindered


def why_of_role(param: Param, roles: Collection[str]) -> str:
    """Why a weight does not stay packed, whatever its format is."""
    if param.role not in ROLES:
        return "only experts, attention and dense layers are multiplied by as they are stored"
    return UNWANTED if param.role not in roles else "more than a product reads it"


def together(
    held: Iterable[tuple[Param, Local]], roles: Collection[str]
) -> Iterable[Mapping[str, list[tuple[Param, Local]]]]:
    """The parameters that may stay packed, by home, in groups of homes of which all stay packed or none."""
    groups: dict[str, dict[str, list[tuple[Param, Local]]]] = {}
    for param, local in held:
        if param.role in roles and len(param.shape) == 2 and (param.role == "expert" or _is_of_product(param)):
            of = param.home.rpartition(".")[0] if param.role == "expert" else param.home
            groups.setdefault(of, {}).setdefault(param.home, []).append((param, local))
    return groups.values()


def _is_of_product(param: Param) -> bool:
    parts = param.home.split(".")
    return parts[-1] == "weight" and len(parts) > 1 and parts[-2] in PRODUCTS


def _hindrance(group: Sequence[tuple[Param, Local]], ledger: Ledger) -> str:
    """What keeps the parameters of one home from staying packed in it, one behind the other; empty: nothing."""
    by_expert: dict[int | None, list[Share]] = {}
    scales = set()
    for param, local in group:
        packed = ledger.sources[param.name].packed
        if packed is None:
            return "a weight that shares its memory is stored plain"
        if words := packed.format.hindrance(packed.tensors[0].dtype):
            return words
        share = _share(ledger.sources[param.name], local)
        if share is None:
            return "it is stored transposed, or in turns with others"
        scales.add(packed.tensors[1].dtype)
        by_expert.setdefault(param.expert, []).append(share)
    if len(scales) > 1 or not scales <= SCALES:
        return f"no operator takes scales in {' beside '.join(sorted(scales))}"
    return next((words for words in map(unfit, by_expert.values()) if words), "")


def _share(source: Source, local: Local) -> Share | None:
    """What a rank reads of a packed weight; None where it is not a run of rows and columns of it."""
    if source.packed is None or source.transpose:
        return None
    *_, rows, columns = source.cut(local.bounds)
    whole = tuple(stop - start for start, stop in local.bounds)
    if rows[2] != 1 or columns[2] != 1 or local.shape != whole:
        return None
    packed = source.packed
    return Share(packed.format, packed.tensors[0].dtype, rows[:2], columns[:2], (packed.shape[-2], packed.shape[-1]))


def unfit(shares: Sequence[Share]) -> str:
    """What keeps shares of weights from lying one behind the other, codes and scales; empty where nothing does.

    All must be in one form, and cut between blocks.
    """
    forms = {(share.format.packing(share.codes), share.codes) for share in shares}
    packing = next(iter(forms))[0]
    if len(forms) > 1 or packing is None:
        return "weights that share its memory are stored in other ways"
    if packing.block[0] == WHOLE and len(shares) > 1:
        return "weights that share its memory have one scale each"
    cut = "a share, or what lies behind it in memory, begins or ends inside a block"
    for index, share in enumerate(shares):
        start, stop = share.rows
        unit = _unit(share.format, ROWS)
        if start % unit or ((stop - start) % unit and index + 1 < len(shares)):
            return cut
        if stop % unit and stop != share.shape[0]:
            return cut
        unit, (start, stop) = _unit(share.format, COLUMNS), share.columns
        if start % unit or (stop % unit and stop != share.shape[1]):
            return cut
    return ""


def _unit(format_: Format, dim: int) -> int:
    """Rows or columns that no cut may part: the blocks of codes and of scales."""
    axes = (axis for part in format_.parts[:2] for axis in part.dims if isinstance(axis, Axis) and axis.dim == dim)
    return math.lcm(*(axis.block for axis in axes))


def _parts(param: Param, local: Local, ledger: Ledger) -> Iterable[Kept]:
    source = ledger.sources[param.name]
    assert source.packed is not None
    box = tuple((start, stop) for start, stop, _ in source.cut(local.bounds))
    codes = source.packed.tensors[0].dtype
    packing = source.packed.format.packing(codes)
    assert packing is not None
    columns = box[-1][1] - box[-1][0]
    for suffix, (info, bounds) in zip(("", SCALE), source.packed.bounds(box)[:2], strict=True):
        shape = tuple(stop - start for start, stop in bounds)[-2:]
        stored = msgspec.structs.replace(
            param,
            name=param.name + suffix,
            shape=info.shape[-2:],
            storage=param.home + suffix,
            dtype=info.dtype,
        )
        how = msgspec.structs.replace(packing, columns=columns) if not suffix else None
        region = tuple((start, stop, 1) for start, stop in bounds)
        said = source.packed if not suffix and any(part.of_shape for part in source.packed.format.parts) else None
        yield Kept(stored, Local(bounds[-2:], shape), info, region, how, said)
