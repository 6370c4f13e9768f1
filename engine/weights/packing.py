"""Quantizes weights into every storage format, in numpy, for synthetic checkpoints.

The other way round, and by plain formulas of its own: what `formats` unpack can be held against it. Rounding is to the
nearest code, scales come from the largest value of a block. For synthetic checkpoints, not for releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.weights.files.safetensors_file import NUMPY_OF_TAG, Tagged, Tensor, bfloat16
from firstlight.engine.weights.formats.awq import ORDER, Awq
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import WHOLE, Format, Part
from firstlight.engine.weights.formats.int8 import Int8
from firstlight.engine.weights.formats.mxfp4 import MxFp4, MxFp4Blocks
from firstlight.engine.weights.formats.nvfp4 import NvFp4
from firstlight.engine.weights.formats.packed_int import PackedInt

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
Parts = dict[str, NDArray[Any]]  # role -> numbers, before they are stored in the part's dtype
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def pack(weight: Floats, format_: Format, seed: int = 0) -> tuple[dict[str, Tensor], Floats]:
    """A weight [..., rows, columns] in a format: its tensors by role, and the numbers that they stand for.

    `seed` draws the order of inputs where the format has one.
    """
    parts, values = PACKERS[type(format_)](np.asarray(weight, np.float32), format_, np.random.default_rng(seed))
    stored = {part.role: _stored(part, parts[part.role], weight.shape) for part in format_.parts}
    return stored, values.astype(np.float32)


def _stored(part: Part, numbers: NDArray[Any], weight: tuple[int, ...]) -> Tensor:
    """Numbers in the usual dtype of a part, in its shape."""
    dtype, shape = part.dtypes[0], part.shape(weight)
    if dtype == "BF16":
        return bfloat16(numbers.astype(np.float32).reshape(shape))
    if dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        return Tagged(dtype, numbers.astype(np.uint8).reshape(shape))
    return numbers.astype(np.dtype(NUMPY_OF_TAG[dtype])).reshape(shape)


def as_stored(scales: Floats, dtype: str) -> Floats:
    """Scales rounded to what their dtype holds; E8M0 and bytes are the next power of two."""
    if dtype in ("F8_E8M0", "U8"):
        return np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    if dtype == "BF16":
        return bfloat16(scales).float32()
    return scales.astype(np.float16).astype(np.float32) if dtype == "F16" else scales.astype(np.float32)


def _exponents(scales: Floats) -> Whole:
    return np.log2(scales).astype(np.int64) + 127


def over_blocks(weight: Floats, block: tuple[int, int], reduce: Callable[..., Any]) -> Floats:
    """One number a block (rows, columns) of the last two dims, partial last blocks included."""
    for dim, size in ((-2, block[0] or weight.shape[-2]), (-1, block[1] or weight.shape[-1])):
        starts = np.arange(0, weight.shape[dim], size)
        weight = reduce.reduceat(weight, starts, axis=weight.ndim + dim)  # type: ignore[attr-defined]
    return weight


def spread(numbers: NDArray[Any], block: tuple[int, int], shape: tuple[int, ...]) -> NDArray[Any]:
    """One number for each element from one a block."""
    for dim in (-2, -1):
        size = block[dim] or shape[dim]
        numbers = np.repeat(numbers, size, axis=numbers.ndim + dim)
    return numbers[..., : shape[-2], : shape[-1]]


def absolute_scales(weight: Floats, block: tuple[int, int], largest: float) -> Floats:
    """A scale a block, so that its largest value becomes the largest code."""
    return np.maximum(over_blocks(np.abs(weight), block, np.maximum) / np.float32(largest), np.float32(2**-60))


@lru_cache(maxsize=4)
def fp8_values(code: str) -> Floats:
    """The finite values of the codes 0 to 127 of an 8-bit float, in order; NaN where a code is not finite."""
    codes = np.arange(128)
    if code == "F8_E5M2":
        with np.errstate(all="ignore"):
            halves = (codes << 8).astype(np.uint16).view(np.float16).astype(np.float32)
        return np.where(np.isfinite(halves), halves, np.nan).astype(np.float32)
    exponent, mantissa = codes >> 3, codes & 7
    small = mantissa * 2.0**-9
    found = np.where(exponent == 0, small, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    return np.where(codes == 127, np.nan, found).astype(np.float32)


def nearest(values: Floats, table: Floats) -> NDArray[np.uint8]:
    """The nearest of a rising table for absolute values, as an index."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, np.abs(values)).astype(np.uint8)


def _float_codes(values: Floats, table: Floats, sign: int) -> tuple[NDArray[np.uint8], Floats]:
    """Codes with the sign in bit `sign`, and the values that they are."""
    index = nearest(values, table)
    signs = np.signbit(values).astype(np.uint8) << np.uint8(sign)
    return (index | signs).astype(np.uint8), np.copysign(table[index], values).astype(np.float32)


def _fp8(weight: Floats, how: Fp8, _: np.random.Generator) -> tuple[Parts, Floats]:
    table = fp8_values(how.code)
    table = table[~np.isnan(table)]
    scales = as_stored(absolute_scales(weight, how.block, float(table[-1])), how.scale)
    codes, values = _float_codes(weight / spread(scales, how.block, weight.shape), table, 7)
    if how.inverse:
        stored = as_stored(np.float32(1) / scales, how.scale)
        return {"codes": codes, "scale": stored}, values / spread(stored, how.block, weight.shape)
    exponents = how.scale in ("F8_E8M0", "U8")
    parts = {"codes": codes, "scale": _exponents(scales) if exponents else scales}
    return parts, values * spread(scales, how.block, weight.shape)


def _whole_numbers(
    weight: Floats, block: tuple[int, int], low: int, high: int, is_even: bool, dtype: str
) -> tuple[Whole, Floats, Whole]:
    """Codes, scales and zero points of whole numbers from `low` to `high`; even ones have their zero in the middle."""
    if is_even:
        scales = as_stored(absolute_scales(weight, block, (high - low) // 2), dtype)
        zeros = np.full(scales.shape, (low + high + 1) // 2, np.int64)
    else:
        least, most = over_blocks(weight, block, np.minimum), over_blocks(weight, block, np.maximum)
        scales = as_stored(np.maximum(most - least, np.float32(2**-60)) / np.float32(high - low), dtype)
        zeros = np.clip(np.round(low - least / scales), low, high).astype(np.int64)
    each, zero = spread(scales, block, weight.shape), spread(zeros, block, weight.shape)
    return np.clip(np.round(weight / each) + zero, low, high).astype(np.int64), scales, zeros


def _values(codes: Whole, scales: Floats, zeros: Whole, block: tuple[int, int]) -> Floats:
    shape = codes.shape
    return (codes - spread(zeros, block, shape)).astype(np.float32) * spread(scales, block, shape)


def _int8(weight: Floats, how: Int8, _: np.random.Generator) -> tuple[Parts, Floats]:
    dtype = how.parts[1].dtypes[0]
    codes, scales, zeros = _whole_numbers(weight, how.block, -128, 127, not how.zero_point, dtype)
    return {"codes": codes, "scale": scales, "zero": zeros}, _values(codes, scales, zeros, how.block)


def _mx_codes(weight: Floats) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """E2M1 codes, scales and values of groups of 32 (OCP MX v1.0, section 6.3)."""
    largest = over_blocks(np.abs(weight), (1, 32), np.maximum)
    scales = np.exp2(np.floor(np.log2(np.maximum(largest, np.float32(2**-60)))) - 2).astype(np.float32)
    each = spread(scales, (1, 32), weight.shape)
    codes, values = _float_codes(weight / each, E2M1, 3)
    return codes, scales, values * each


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def _mxfp4(weight: Floats, how: MxFp4 | MxFp4Blocks, _: np.random.Generator) -> tuple[Parts, Floats]:
    codes, scales, values = _mx_codes(weight)
    return {"codes": _pairs(codes), "scale": _exponents(scales)}, values


def _nvfp4(weight: Floats, how: NvFp4, _: np.random.Generator) -> tuple[Parts, Floats]:
    table = fp8_values("F8_E4M3")[:127]
    top = np.float32(448 * 6)
    largest = np.maximum(np.abs(weight).max(axis=(-2, -1), keepdims=True), np.float32(2**-60))
    outer = (top / largest if how.divide else largest / top).astype(np.float32)
    inner = over_blocks(np.abs(weight), (1, 16), np.maximum) / np.float32(6)
    wanted = inner * outer if how.divide else inner / outer
    scale_codes = np.maximum(nearest(wanted, table), 1)  # never a scale of zero
    scales = table[scale_codes]
    both = (scales / outer if how.divide else scales * outer).astype(np.float32)
    each = spread(both, (1, 16), weight.shape)
    codes, values = _float_codes(weight / each, E2M1, 3)
    return {"codes": _pairs(codes), "scale": scale_codes, "outer": outer}, values * each


def words(codes: NDArray[Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Codes in 32-bit words along a dim, lowest bits first; `order[i]` is the place of code i.

    Of widths that divide no word, 32 codes become as many words, bit by bit.
    """
    if 32 % bits:
        moved = np.moveaxis(codes.astype(np.uint8), axis, -1)
        moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % 32)])
        each = (moved[..., None] >> np.arange(bits, dtype=np.uint8)) & 1  # lowest first
        stream = np.packbits(each.reshape(*moved.shape[:-1], -1), axis=-1, bitorder="little")
        return np.moveaxis(stream.view("<i4"), -1, axis)
    per_word = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    missing = -moved.shape[-1] % per_word
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, missing)])
    split = moved.reshape(*moved.shape[:-1], -1, per_word)
    found = np.zeros(split.shape[:-1], np.uint32)
    for index in range(per_word):
        found |= split[..., index] << np.uint32(bits * (order[index] if order else index))
    return np.moveaxis(found, -1, axis).view(np.int32)


def _packed_int(weight: Floats, how: PackedInt, draw: np.random.Generator) -> tuple[Parts, Floats]:
    middle, dtype = 1 << (how.bits - 1), how.parts[1].dtypes[0]
    order, arranged, back = _ordered(weight, how.group, how.ordered, draw)
    codes, scales, zeros = _whole_numbers(arranged, (1, how.group), -middle, middle - 1, not how.zero_point, dtype)
    values = _values(codes, scales, zeros, (1, how.group))[..., back]
    parts: Parts = {
        "codes": words(codes[..., back] + middle, how.bits, -1),
        "scale": scales,
        "shape": np.array(weight.shape),
        "zero": words(zeros + middle, how.bits, -2),
        "order": order,
    }
    return parts, values


def _ordered(
    weight: Floats, group: int, is_ordered: bool, draw: np.random.Generator
) -> tuple[Whole, Floats, NDArray[np.intp]]:
    """The group of each input, the weight with inputs of a group side by side, and how to put them back."""
    columns = weight.shape[-1]
    chosen = draw.permutation(columns) if is_ordered else np.arange(columns)
    back = np.argsort(chosen)
    groups = (np.arange(columns) // (group or columns))[back]
    return np.broadcast_to(groups, (*weight.shape[:-2], columns)), weight[..., chosen], back


def _awq(weight: Floats, how: Awq, _: np.random.Generator) -> tuple[Parts, Floats]:
    block = (1, how.group)
    codes, scales, zeros = _whole_numbers(weight, block, 0, 15, how.symmetric, "F16")
    parts: Parts = {
        "codes": words(np.swapaxes(codes, -1, -2), 4, -1, ORDER),
        "zero": words(np.swapaxes(zeros, -1, -2), 4, -1, ORDER),
        "scale": np.swapaxes(scales, -1, -2),
    }
    return parts, _values(codes, scales, zeros, block)


def _gptq(weight: Floats, how: Gptq, draw: np.random.Generator) -> tuple[Parts, Floats]:
    block, most = (1, how.group), (1 << how.bits) - 1
    order, arranged, back = _ordered(weight, how.group, how.ordered and how.group != WHOLE, draw)
    codes, scales, zeros = _whole_numbers(arranged, block, 0, most, how.symmetric, "F16")
    zeros = np.clip(zeros, how.zero_offset, most)
    each, zero = (spread(numbers, block, arranged.shape) for numbers in (scales, zeros))
    codes = np.clip(np.round(arranged / each) + zero, 0, most).astype(np.int64)
    parts: Parts = {
        "codes": words(np.swapaxes(codes[..., back], -1, -2), how.bits, -2),
        "zero": words(np.swapaxes(zeros - how.zero_offset, -1, -2), how.bits, -1),
        "scale": np.swapaxes(scales, -1, -2),
        "order": order,
    }
    return parts, _values(codes, scales, zeros, block)[..., back]


PACKERS: Mapping[type[Format], Callable[..., tuple[Parts, Floats]]] = {
    Fp8: _fp8,
    Int8: _int8,
    MxFp4: _mxfp4,
    MxFp4Blocks: _mxfp4,
    NvFp4: _nvfp4,
    PackedInt: _packed_int,
    Awq: _awq,
    Gptq: _gptq,
}
