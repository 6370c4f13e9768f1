"""What storage formats have in common: a weight that lies in several stored tensors, and the part of each that a box
of the weight needs. No torch.

A weight is [..., rows, columns]: rows are outputs, columns inputs, dims before them experts. A box is [start, stop) per
dim of it. Every format is a grid: one index of a stored tensor stands for a block of rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.kernels.packed.kinds import CODE_BITS

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
ROWS, COLUMNS = -2, -1
SCALES = ("F32", "BF16", "F16", "F64")
WHOLE = 0  # of a block: one scale for all rows, or all columns
UNCUT = -1  # columns of something that is held whole, whatever columns of the weight are


class Axis(msgspec.Struct, frozen=True, gc=False):
    """A dim of a stored tensor: `words` indices stand for `block` rows or columns; `whole`: it is never cut."""

    dim: int
    block: int = 1
    whole: bool = False
    words: int = 1

    def count(self, shape: tuple[int, ...]) -> int:
        return -(-shape[self.dim] // self.block) * self.words

    def bounds(self, box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
        """The indices that `box` needs: a block that it cuts is read whole."""
        if self.whole:
            return 0, self.count(shape)
        start, stop = box[self.dim]
        first = start // self.block
        return first * self.words, max(-(-stop // self.block), first) * self.words


class Part(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor of a format: how its name ends, the dtypes it may have (the usual one first), and its dims.

    A dim is an `Axis`, or the extent of one that belongs to every block. Experts' dims stand before these. A part
    `of_shape` holds one number for each dim of the weight.
    """

    role: str
    suffix: str
    dtypes: tuple[str, ...]
    dims: tuple[Axis | int, ...]
    of_shape: bool = False

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """What the stored tensor of a weight of this shape must be."""
        if self.of_shape:
            return (len(weight),)
        own = tuple(dim if isinstance(dim, int) else dim.count(weight) for dim in self.dims)
        return weight[:ROWS] + own

    def bounds(self, box: Box, weight: tuple[int, ...]) -> Box:
        """The part of the stored tensor that `box` of the weight needs."""
        if self.of_shape:
            return ((0, len(weight)),)
        own = tuple((0, dim) if isinstance(dim, int) else dim.bounds(box, weight) for dim in self.dims)
        return box[:ROWS] + own


class Packing(msgspec.Struct, frozen=True):
    """How an operator multiplies by a weight that stays packed (`kernels/packed/matrix.py`): the kind of its codes, and
    what stands beside them.

    `block`: rows and columns that share a scale and a zero point. `zero`: there are zero points. `outer`: what a scale
    of the scales does to them, `times` or `by`; empty: there is none. `ordered`: every input says which group it is in;
    scales and zero points of all `groups` are there then, whatever columns are. `rows` share an outer scale and an
    order. The last three, and `columns`, are of the part of a weight, or of several, that a rank holds.
    """

    code: str
    block: tuple[int, int]
    zero: bool = False
    outer: str = ""
    ordered: bool = False
    rows: int = WHOLE
    columns: int = 0
    groups: int = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the tensors that are held, codes and scales first."""
        more = (("zero", self.zero), ("outer", self.outer), ("order", self.ordered))
        return ("codes", "scale", *(role for role, is_there in more if is_there))

    def grid(self, role: str) -> tuple[int, int]:
        """Rows and columns that one index of it stands for; `WHOLE`: all of them; `UNCUT` columns: it has its own."""
        if role == "codes":
            return 1, UNCUT
        if role in ("scale", "zero"):
            return self.block[0], UNCUT if self.ordered else self.block[1]
        return self.rows, WHOLE if role == "outer" else 1

    def shape(self, role: str, rows: int) -> tuple[int, int]:
        """The shape of what is held for `rows` rows."""
        of_rows, of_columns = self.grid(role)
        if role == "codes":
            return rows, -(-self.columns * CODE_BITS[self.code] // 8)
        columns = self.groups if of_columns == UNCUT else blocks(self.columns, of_columns)
        return blocks(rows, of_rows), columns


def words_of(dim: int, bits: int) -> Axis:
    """Codes in 32-bit words one behind the other: 32 codes of a width that divides no word lie in as many words."""
    return Axis(dim, 32, words=bits) if 32 % bits else Axis(dim, 32 // bits)


def blocks(size: int, block: int) -> int:
    """How many blocks there are in so many rows or columns."""
    return -(-size // block) if block else 1


class Format(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A format with its parameters. Subclasses say which `parts` it has and how numbers come out of them."""

    label: ClassVar[str] = ""
    swapped: ClassVar[bool] = False  # the tensor that rules speak of is [..., columns, rows]
    of_linear: ClassVar[bool] = False  # rows are outputs, however an architecture has its plain weight

    @classmethod
    def kinds(cls) -> tuple[type[Format], ...]:
        """Every format whose file has been read: its class says that it is one, and no list says it again."""
        return tuple(found for kind in cls.__subclasses__() for found in (kind, *kind.kinds()))

    @property
    def padding(self) -> int:
        """Columns are stored in words of so many, the last of which may be part empty."""
        return 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors; the first holds the numbers and gives the weight's shape."""
        raise NotImplementedError

    def variants(self) -> tuple[Format, ...]:
        """This format as headers may spell it: itself, then what configurations leave open."""
        return (self,)

    def weight_shape(self, main: tuple[int, ...]) -> tuple[int, ...] | None:
        """[..., rows, columns] of a weight whose first part has this shape, counting whole words; None: impossible."""
        dims = self.parts[0].dims
        if len(main) < len(dims):
            return None
        lead, own = main[: len(main) - len(dims)], main[len(main) - len(dims) :]
        sizes = {ROWS: 1, COLUMNS: 1}
        for dim, size in zip(dims, own, strict=True):
            if isinstance(dim, int):
                if dim != size:
                    return None
            elif size % dim.words:
                return None
            else:
                sizes[dim.dim] = size // dim.words * dim.block
        return (*lead, sizes[ROWS], sizes[COLUMNS])

    def nbytes(self, shape: tuple[int, ...], box: Box) -> int:
        """Bytes that `box` of a weight of `shape` takes, scales included; a cut block counts whole."""
        return sum(
            math.prod(stop - start for start, stop in part.bounds(box, shape)) * DTYPE_BITS[part.dtypes[0]] // 8
            for part in self.parts
        )

    def is_even(self, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        """Whether shards of shape `local` cut a weight of `shape` only between blocks."""
        axes = [axis for part in self.parts for axis in part.dims if isinstance(axis, Axis) and not axis.whole]
        return all(local[a.dim] == shape[a.dim] or local[a.dim] % a.block == 0 for a in axes)

    def keeps_all(self, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
        """Whether every shard of `local` needs all scales of its rows: a list says the group of each input."""
        axes = [axis for part in self.parts for axis in part.dims if isinstance(axis, Axis) and axis.whole]
        return any(local[a.dim] != shape[a.dim] and a.count(shape) > 1 for a in axes)

    def packing(self, codes: str) -> Packing | None:
        """How an operator multiplies by codes of this dtype; None: they are always unpacked.

        What stands beside codes has the roles of the stored parts, and `laid` gives each as it is held.
        """
        return None

    def hindrance(self, codes: str) -> str:
        """Why operators cannot multiply by codes of this dtype; empty if they can."""
        return "" if self.packing(codes) is not None else f"no operator multiplies by codes in {codes}"

    def lies(self, role: str) -> bool:
        """Whether a stored part is held byte for byte as stored."""
        return role in ("codes", "scale")

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        """A part as it is held, [rows, columns], of the blocks that `box` needs, from what its `bounds` hold.

        Of codes these are bytes, the first of which begins with the first column of the box.
        """
        raise NotImplementedError

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        """The numbers of `box`, float32, from the `bounds` of each part by role."""
        raise NotImplementedError

    def problem(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[str, str, str] | None:
        """What is wrong with companion tensors, as (role of the part, expected, found); None if nothing."""
        return None

    def describe(self) -> str:
        """`MXFP4, groups of 32` and the like."""
        return self.label


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A weight as rules see it, `name` of `shape`, that lies in `tensors`, in the order of the format's parts."""

    name: str
    shape: tuple[int, ...]
    format: Format
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def bounds(self, box: Box) -> tuple[tuple[TensorInfo, Box], ...]:
        """What `box` needs of each stored tensor."""
        return tuple((tensor, part.bounds(box, self.shape)) for part, tensor in self.stored())

    def stored(self, roles: Collection[str] | None = None) -> Iterator[tuple[Part, TensorInfo]]:
        """The stored tensors of these roles (None: all), in their order, each with what it is."""
        parts = zip(self.format.parts, self.tensors, strict=True)
        return ((part, tensor) for part, tensor in parts if roles is None or part.role in roles)

    def box_bytes(self, box: Box, roles: Collection[str] | None = None) -> int:
        """Bytes as stored that `box` needs, of these roles (None: all)."""
        return sum(
            math.prod(stop - start for start, stop in part.bounds(box, self.shape)) * DTYPE_BITS[tensor.dtype] // 8
            for part, tensor in self.stored(roles)
        )


def blocked(block: tuple[int, int]) -> tuple[Axis | int, ...]:
    """The dims of a scale per block of (rows, columns); `WHOLE` is one for all."""
    rows, columns = block
    return (Axis(ROWS, rows) if rows else 1, Axis(COLUMNS, columns) if columns else 1)


def spellings(block: tuple[int, int]) -> tuple[tuple[Axis | int, ...], ...]:
    """How releases write the dims of a scale: [R, 1] or [R], [1, 1], [1] or [], [R, C] or [R, 1, C, 1]."""
    dims = blocked(block)
    if dims == (1, 1):
        return dims, (1,), ()
    return (dims, dims[:1]) if dims[1] == 1 else (dims, (dims[0], 1, dims[1], 1))


def as_grid(scale: Tensor, dims: tuple[Axis | int, ...]) -> Tensor:
    """A scale, however its dims are spelt, as [..., rows, columns]."""
    own = scale.shape[len(scale.shape) - len(dims) :]
    sizes = {dim.dim: size for dim, size in zip(dims, own, strict=True) if isinstance(dim, Axis)}
    return scale.reshape(*scale.shape[: len(scale.shape) - len(dims)], sizes.get(ROWS, 1), sizes.get(COLUMNS, 1))
