"""What stored tensors stand for by the formulas that their writers publish, in numpy: a second way to read each format.

`formats` unpack parts of weights, fast; engines compute with that. References compute with this, which takes whole
tensors, tables and one rule for codes of any width, and shares no code with the other: a fault of either shows when the
two are compared. What is computed with what is in a `Recipe`. Numbers are float32, by the same roundings, so that they
are equal to the last bit.

Sources: OCP Microscaling Formats (MX) v1.0, section 5; OCP 8-bit Floating Point (OFP8) v1.0; those that the files of
`formats` name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.engine.weights.recipes import Recipe

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Stored = Mapping[str, Tensor]
Shape = tuple[int, ...]
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # AWQ: where a word has output i of eight


def published(recipe: Recipe, stored: Stored) -> Tensor:
    """A whole weight [..., rows, columns], float32, from its tensors by role. `KeyError`: no such formula."""
    shape = recipe.shape
    found = torch.empty(shape)
    if len(shape) > 2:  # expert by expert
        each_one = recipe._replace(shape=shape[1:])
        for index, one in enumerate(found):
            one.copy_(published(each_one, {role: tensor[index] for role, tensor in stored.items()}))
        return found
    with np.errstate(over="ignore", invalid="ignore"):  # codes may be infinite, or no numbers
        return found.copy_(torch.from_numpy(np.ascontiguousarray(FORMULAS[recipe.formula](recipe, stored))))


class Layout(NamedTuple):
    """An 8-bit float: its exponent's bias, its mantissa's bits, and which codes are infinite (`inf`) or no numbers."""

    bias: int
    mantissa: int
    nan: frozenset[int]
    inf: frozenset[int] = frozenset()


E5M2_NAN = frozenset(code | sign for code in (0x7D, 0x7E, 0x7F) for sign in (0, 0x80))
FLOATS: Mapping[torch.dtype, Layout] = {
    torch.float8_e4m3fn: Layout(7, 3, frozenset((0x7F, 0xFF))),
    torch.float8_e5m2: Layout(15, 2, E5M2_NAN, frozenset((0x7C, 0xFC))),
    torch.float8_e4m3fnuz: Layout(8, 3, frozenset((0x80,))),
    torch.float8_e5m2fnuz: Layout(16, 2, frozenset((0x80,))),
}


@lru_cache(maxsize=8)
def table_of(layout: Layout) -> Floats:
    """The numbers of all codes: (-1)^sign x 2^(exponent - bias) x 1.mantissa, without the one where exponents are 0."""

    def number(code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        exponent, fraction = (code & 0x7F) >> layout.mantissa, code & ((1 << layout.mantissa) - 1)
        if code in layout.nan:
            return float("nan")
        if code in layout.inf:
            return sign * float("inf")
        whole = fraction / (1 << layout.mantissa) + (1 if exponent else 0)
        return float(sign * whole * 2.0 ** (max(exponent, 1) - layout.bias))

    return np.array([number(code) for code in range(256)], np.float32)


@lru_cache(maxsize=1)
def exponents() -> Floats:
    """E8M0: 2^(byte - 127); the last is no number."""
    return np.array([*(2.0 ** (byte - 127) for byte in range(255)), np.nan], np.float32)


def raw(stored: Tensor) -> Codes:
    """The bytes of the last dim."""
    found: Codes = stored.contiguous().view(torch.uint8).numpy()
    return found


def numbers(stored: Tensor) -> Floats:
    """A float, an 8-bit one, a whole number, or (bytes and E8M0) an exponent, as float32."""
    if stored.dtype in FLOATS:
        return table_of(FLOATS[stored.dtype])[raw(stored)]
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return exponents()[raw(stored)]
    found: Floats = stored.float().numpy()
    return found


@lru_cache(maxsize=4)
def codes_of_bytes(bits: int) -> Codes:
    """The codes in every byte [256, 8 / bits], lowest bits first."""
    return np.array([[byte >> place & (1 << bits) - 1 for place in range(0, 8, bits)] for byte in range(256)], np.uint8)


def codes(packed: NDArray[Any], bits: int) -> Codes:
    """Codes one behind the other in bytes or words [n, m], lowest bits first -> [n, m x their bits / bits]."""
    whole = np.ascontiguousarray(packed).view(np.uint8)
    if bits in (2, 4, 8):
        return codes_of_bytes(bits).take(whole, axis=0).reshape(len(whole), -1)
    single = np.unpackbits(whole, axis=-1, bitorder="little").reshape(len(whole), -1, bits)
    return np.packbits(single, axis=-1, bitorder="little")[..., 0]


@lru_cache(maxsize=1)
def e2m1_of_bytes() -> Floats:
    """The two numbers in every byte, the low code first: sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate((table, -table)).take(codes_of_bytes(4))


def e2m1(stored: Tensor, shape: Shape) -> Floats:
    """Two codes a byte, rows of any dims, as [rows, columns]."""
    return e2m1_of_bytes().take(raw(stored), axis=0).reshape(shape[0], -1)[:, : shape[1]]


def each(given: NDArray[Any], block: tuple[int, int], shape: Shape) -> NDArray[Any]:
    """What is given per block (rows, columns; 0: all), [R, C], for every element of [rows, columns], or broadcast."""
    for dim in (0, 1):
        given = given if block[dim] < 2 else np.repeat(given, block[dim], axis=dim)
    return given[: shape[0], : shape[1]]


def grid(given: Tensor, block: tuple[int, int], shape: Shape) -> Floats:
    """What is given per block, however its dims are spelt, as [R, C]."""
    rows, columns = (-(-size // (own or size)) for size, own in zip(shape, block, strict=True))
    return each(numbers(given).reshape(rows, columns), block, shape)


def _float(how: Recipe, stored: Stored) -> Floats:
    values, scale = numbers(stored["codes"]), grid(stored["scale"], how.block, how.shape)
    return values / scale if how.divides else values * scale


def _whole(how: Recipe, stored: Stored) -> Floats:
    values = numbers(stored["codes"])
    if "zero" in stored:
        values = values - grid(stored["zero"], how.block, how.shape)
    return values * grid(stored["scale"], how.block, how.shape)


def _exponents(how: Recipe, stored: Stored) -> Floats:
    """A byte of exponents for each 32 inputs; blocks have a dim of their own in one layout, sixteen bytes long."""
    exponent = exponents()[raw(stored["scale"])]
    return e2m1(stored["codes"], how.shape) * each(exponent, how.block, how.shape)


def _twice(how: Recipe, stored: Stored) -> Floats:
    scale, outer = numbers(stored["scale"]), numbers(stored["outer"]).reshape(1, 1)
    both = scale / outer if how.divides else scale * outer
    return e2m1(stored["codes"], how.shape) * each(both, how.block, how.shape)


def _by_groups(how: Recipe, stored: Stored, found: Codes, zeros: NDArray[Any] | int, scales: Floats) -> Floats:
    """(code - zero) x scale, with the zero point and scale [rows, G] of each input's group."""

    def of_inputs(given: NDArray[Any]) -> NDArray[Any]:
        return given[:, stored["order"].long().numpy()] if "order" in stored else each(given, how.block, how.shape)

    zero = zeros if isinstance(zeros, int) else of_inputs(zeros.astype(np.float32))
    return (found.astype(np.float32) - np.float32(zero)) * of_inputs(scales)


def _words(how: Recipe, stored: Stored) -> Floats:
    """Codes and zero points are both shifted by half of their range, which the difference of the two does not see."""
    rows, columns = how.shape
    found = codes(stored["codes"].numpy(), how.bits)[:, :columns]
    zeros = codes(stored["zero"].numpy().T, how.bits).T[:rows] if "zero" in stored else 1 << (how.bits - 1)
    return _by_groups(how, stored, found, zeros, numbers(stored["scale"]))


def _outputs(how: Recipe, stored: Stored) -> Floats:
    """AWQ: eight outputs a word, in the order of `PLACES`."""
    places = (np.arange(0, how.shape[0], 8)[:, np.newaxis] + PLACES).ravel()
    found, zeros = (codes(stored[role].numpy(), 4).take(places, axis=1).T for role in ("codes", "zero"))
    return _by_groups(how, stored, found, zeros, numbers(stored["scale"]).T)


def _inputs(how: Recipe, stored: Stored) -> Floats:
    """GPTQ: where zero points were stored less one, it is added as writers took it (`gptq`)."""
    rows, columns = how.shape
    found, words = codes(stored["codes"].numpy().T, how.bits)[:, :columns], stored["zero"].numpy()
    if how.less and 32 % how.bits == 0:  # from every place of a word at once
        ones = sum(how.less << place for place in range(0, 32, how.bits))
        words = ((words.astype(np.int64) + ones) & 0xFFFFFFFF).astype(np.uint32)
    zeros: NDArray[Any] = codes(words, how.bits)
    if how.less and 32 % how.bits:  # from each alone
        zeros = (zeros.astype(np.int64) + how.less) % (1 << how.bits)
    return _by_groups(how, stored, found, zeros[:, :rows].T, numbers(stored["scale"]).T)


FORMULAS: Mapping[str, Callable[[Recipe, Stored], Floats]] = {
    "float": _float,
    "whole": _whole,
    "exponents": _exponents,
    "twice": _twice,
    "words": _words,
    "outputs": _outputs,
    "inputs": _inputs,
}
