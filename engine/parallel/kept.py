"""Weights that stay packed on a rank: codes, and beside them scales and what else their format has. No torch.

A weight is kept so where an operator multiplies by its codes (`Format.packing`) and nothing but a product reads it.
What a rank holds of it lies row by row, whatever the order in the file is; where its share begins inside a block,
blocks are made smaller. Everything else that is stored packed is unpacked while it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from firstlight.engine.model.spec import Param
from firstlight.engine.parallel.placement import Local
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.formats.grid import WHOLE, Format, Packed, Packing, blocks
from firstlight.engine.weights.source import Region, Source
from firstlight.kernels.packed.kinds import CODE_BITS, KINDS, kind_of

SCALE = "_scale"  # what the names of scales end with, behind that of the weight
# How the names of what a weight is held as end, by role (`Packing.roles`).
SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"codes": "", "scale": SCALE, "zero": "_zero", "outer": "_outer", "order": "_order"}
)
SCALES = frozenset(("F32", "BF16", "F16", "U8", "F8_E8M0", "F8_E4M3"))
# Weights that are read by products alone, by the last part of their name; what a block reads otherwise is unpacked.
PRODUCTS = frozenset(("qkv", "o", "q", "q_a", "q_b", "kv", "kv_a", "g", "gate", "up", "gate_up", "down", "in", "o_b"))
ROLES = frozenset(("expert", "attention", "mlp"))  # of weights that may stay packed
OTHERWISE = "weights that share its memory are stored in other ways"
UNWANTED = "as it is chosen for this device, or asked for (--packed)"
Wish = Literal["auto", "always", "never"]
WISHES: tuple[Wish, ...] = ("auto", "always", "never")
Residency = Literal["resident", "streamed", "experts"]  # engine/weights/loading/residency.py
RESIDENCIES: tuple[Residency, ...] = ("resident", "streamed", "experts")


class Kept(NamedTuple):
    """One tensor that a weight is held as, by its role: as a parameter, what is read for it, and of which weight."""

    role: str
    tensor: str
    param: Param
    local: Local
    region: Region
    packed: Packed
    packing: Packing


class Share(NamedTuple):
    """A rank's (start, stop, step) in rows and columns of a weight with so many, in a format.

    `dtypes` of the stored tensors, as the format has its parts.
    """

    format: Format
    dtypes: tuple[str, ...]
    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    shape: tuple[int, int]

    @property
    def stored(self) -> dict[str, str]:
        """The dtypes of the stored tensors by role."""
        return {part.role: dtype for part, dtype in zip(self.format.parts, self.dtypes, strict=True)}

    def held(self) -> Iterator[str]:
        """The dtypes of what it is held as."""
        stored = self.stored
        return (held_dtype(role, stored[role]) for role in _packing(self).roles)

    @property
    def height(self) -> int:
        """Rows of the share."""
        return -(-(self.rows[1] - self.rows[0]) // self.rows[2])


class Keep(msgspec.Struct, frozen=True):
    """What stays packed where an operator multiplies by it, and `why`.

    `roles` of weights; linear layers in these `kinds` of codes alone (`kernels/packed/kinds.py`), where there are any.
    """

    roles: frozenset[str]
    why: str
    kinds: frozenset[str] | None = None

    @property
    def is_all(self) -> bool:
        """Whether nothing is left that could stay packed and does not."""
        return self.roles == ROLES and self.kinds is None


def usually(wish: Wish, device_type: str, faster: Collection[str] = ()) -> Keep:
    """What stays packed while there is room for the rest unpacked.

    `faster`: kinds of codes that this device's linear layers multiply by faster than by plain numbers, as all ranks
    have agreed. Of experts only those that tokens chose are unpacked, so that they stay packed in any case.
    """
    if wish == "never":
        return Keep(frozenset(), "everything is unpacked when it is read, as asked for")
    if wish == "always":
        return Keep(ROLES, "whatever an operator can multiply by stays packed, as asked for")
    if device_type != "cpu":
        return Keep(ROLES, "whatever an operator can multiply by stays packed")
    if not faster:
        why = "experts stay packed; linear layers are unpacked, which this CPU multiplies by faster"
        return Keep(frozenset(("expert",)), why)
    kinds = frozenset(faster)
    why = (
        f"experts stay packed, and linear layers in {_listed(kinds)}, which this CPU multiplies one or two tokens by "
        "faster than by plain numbers, but 16 at once not (--packed never); linear layers in other codes are unpacked"
    )
    return Keep(ROLES, why, kinds)


def _listed(kinds: Collection[str]) -> str:
    return ", ".join(kind for kind in KINDS if kind in kinds)


class Room(NamedTuple):
    """Bytes that a rank may take for weights; `is_budget`: as asked for, not as the machine has."""

    nbytes: int
    is_budget: bool = False


Everyone = Callable[[tuple[int, ...]], Sequence[Sequence[int]]]  # numbers of this rank -> those of all, in their order


def by_itself(numbers: tuple[int, ...]) -> Sequence[Sequence[int]]:
    """The numbers of one rank: its own."""
    return (numbers,)


def settled(
    wish: Wish,
    device_type: str,
    faster: Collection[str],
    nbytes_of: Callable[[Keep], int],
    room: Room,
    everyone: Everyone = by_itself,
) -> Keep:
    """What stays packed on every rank, one decision of all of them: each gives its own figures to `everyone`.

    Kinds that are faster are those that are on all ranks. What CPUs would rather have unpacked stays packed as well
    where the weights of any rank, `nbytes_of` what is kept, would take more than its own `room`.
    """
    own = sum(1 << index for index, kind in enumerate(KINDS) if kind in faster)
    masks = [mask for (mask,) in everyone((own,))]
    keep = usually(wish, device_type, [kind for i, kind in enumerate(KINDS) if all(mask >> i & 1 for mask in masks)])
    if wish != "auto" or keep.is_all:
        return keep
    for rank, (nbytes, room_bytes, is_budget) in enumerate(everyone((nbytes_of(keep), *room))):
        if nbytes > room_bytes:
            limit = "the budget for weights (--weights-budget) is" if is_budget else "there is room for"
            whose = f"rank {rank}'s" if len(masks) > 1 else "a rank's"
            why = f"whatever an operator can multiply by stays packed: with linear layers unpacked {whose} weights"
            return Keep(ROLES, f"{why} would take at least {nbytes:,} bytes, and {limit} {room_bytes:,}")
    return keep


def kept_packed(
    held: Sequence[tuple[Param, Local]],
    sources: Iterable[Source],
    roles: Collection[str],
    kinds: Collection[str] | None = None,
) -> tuple[dict[str, tuple[Kept, ...]], dict[str, str]]:
    """By name of the parameters that stay packed, codes and what stands beside them, which take their place; of others
    of these roles, what keeps them from it. `sources`: where each parameter comes from. `kinds`: of codes that linear
    layers stay packed in; None: all.

    Parameters that share an allocation, and all experts of a layer, are kept together or not at all: one operator
    multiplies by all of them.
    """
    source_of = {param.name: source for (param, _), source in zip(held, sources, strict=True)}
    found: dict[str, tuple[Kept, ...]] = {}
    hindered: dict[str, str] = {}
    for homes in together(held, roles):
        ways = {home: wanted(_way(group, source_of), group[0][0], kinds) for home, group in homes.items()}
        first = next((way for way in ways.values() if isinstance(way, str)), "")
        for home, param, local in ((home, *one) for home, group in homes.items() for one in group):
            way = ways[home]
            if isinstance(way, str):
                hindered[param.name] = way
            elif first:
                hindered[param.name] = f"kept as what it is multiplied with is: {first}"
            else:
                found[param.name] = tuple(_parts(param, local, source_of[param.name], way))
    return found, hindered


def wanted(way: Packing | str, param: Param, kinds: Collection[str] | None) -> Packing | str:
    """How a weight stays packed, unless plain numbers are multiplied by faster than its kind of codes."""
    if isinstance(way, str) or kinds is None or param.role == "expert":
        return way
    kind = kind_of(way.code, way.block[1], way.ordered)
    return way if kind in kinds else f"{kind}: plain numbers are multiplied by faster here"


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


def _way(group: Sequence[tuple[Param, Local]], source_of: Mapping[str, Source]) -> Packing | str:
    """How the parameters of one home are held in it, one behind the other, or what keeps them from staying packed."""
    by_expert: dict[int | None, list[Share]] = {}
    for param, local in group:
        source = source_of[param.name]
        if source.packed is None:
            return "a weight that shares its memory is stored plain"
        share = _share(source, source.packed, local)
        if share is None:
            return "it is stored transposed, or in turns with others"
        by_expert.setdefault(param.expert, []).append(share)
    return way_of(map(tuple, by_expert.values()))


def way_of(experts: Iterable[tuple[Share, ...]]) -> Packing | str:
    """How shares of weights lie one behind the other, of every expert in the same way, or what keeps them from it.

    Blocks become as small as it takes for every share, and whatever lies behind another one, to begin with a block.
    """
    stacks = tuple(dict.fromkeys(experts))
    shares = tuple(dict.fromkeys(share for stack in stacks for share in stack))
    if words := next(filter(None, (share.format.hindrance(share.dtypes[0]) for share in shares)), ""):
        return words
    held = {tuple(share.held()) for share in shares}
    scales = {dtypes[1] for dtypes in held}
    if len(scales) > 1 or not scales <= SCALES:
        return f"no operator takes scales in {' beside '.join(sorted(scales))}"
    if len(held) > 1 or len({(_packing(share), share.columns, share.shape[1]) for share in shares}) > 1:
        return OTHERWISE
    ways = {_way_of_stack(stack) for stack in stacks}
    found, (first, *_) = ways.pop(), shares
    if ways:
        return OTHERWISE
    if first.columns[0] * CODE_BITS[found.code] % 8:
        return "a share begins inside a byte"
    rows = sum(share.height for share in stacks[0])
    if held_bytes(found, first.stored, rows) > 2 * rows * found.columns:
        return "what stands beside codes, in blocks as small as a share asks for, would take more memory than numbers"
    return found


def _share(source: Source, packed: Packed, local: Local) -> Share | None:
    """What a rank reads of a packed weight; None where it is not rows of it, from one column to another."""
    *_, rows, columns = source.cut(local.bounds)
    if source.transpose or columns[2] != 1 or local.shape != tuple(stop - start for start, stop in local.bounds):
        return None
    dtypes = tuple(tensor.dtype for tensor in packed.tensors)
    return Share(packed.format, dtypes, rows, columns, (packed.shape[-2], packed.shape[-1]))


def _packing(share: Share) -> Packing:
    found = share.format.packing(share.dtypes[0])
    assert found is not None, share.format
    return found


def _way_of_stack(stack: Sequence[Share]) -> Packing:
    first, packing = stack[0], _packing(stack[0])
    rows, together, offset = packing.block[0], WHOLE, 0
    for share in stack:
        rows = math.gcd(rows, _fitting(packing.block[0], share.rows, share.shape[0]), offset)
        together, offset = math.gcd(together, offset), offset + share.height
    group = packing.block[1]
    columns = group if packing.ordered else _fitting(group, first.columns, first.shape[1])
    return msgspec.structs.replace(
        packing,
        block=(rows, columns),
        rows=together if packing.outer or packing.ordered else WHOLE,
        columns=first.columns[1] - first.columns[0],
        groups=blocks(first.shape[1], group) if packing.ordered else 0,
    )


def _fitting(block: int, cut: tuple[int, int, int], size: int) -> int:
    """The largest part of a block that a share, and any other of its length, begins with, counted in its own rows."""
    start, stop, step = cut
    if step > 1:
        if block % step:
            return 1
        block, start, stop = block // step, start // step, start // step + -(-(stop - start) // step)
    return block if (start, stop) == (0, size) else math.gcd(block, start, stop - start) if block else block


def held_dtype(role: str, stored: str) -> str:
    """The dtype of what is held, from that of the stored tensor."""
    if role == "zero":
        return "I8" if stored == "I32" else stored
    return {"codes": "U8", "outer": "F32", "order": "I32"}.get(role, stored)


def held_bytes(packing: Packing, stored: Mapping[str, str], rows: int) -> int:
    """Bytes of all that is held of so many rows."""
    return sum(
        math.prod(packing.shape(role, rows)) * DTYPE_BITS[held_dtype(role, stored[role])] // 8 for role in packing.roles
    )


def _parts(param: Param, local: Local, source: Source, packing: Packing) -> Iterable[Kept]:
    packed = source.packed
    assert packed is not None
    stored = {part.role: tensor for part, tensor in packed.stored()}
    region = source.cut(local.bounds)
    for role in packing.roles:
        shape, tensor = packing.shape(role, local.shape[0]), stored[role]
        held = msgspec.structs.replace(
            param,
            name=param.name + SUFFIXES[role],
            shape=shape,
            storage=param.home + SUFFIXES[role],
            dtype=held_dtype(role, tensor.dtype),
        )
        whole = Local(tuple((0, size) for size in shape), shape)
        yield Kept(role, tensor.name, held, whole, region, packed, packing)
