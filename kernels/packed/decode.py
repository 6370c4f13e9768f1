"""How a tile of a weight comes into a Triton kernel: loaded as it is, or decoded from codes and scales, bit by bit.

A kernel calls `weight_tile` with the kind of codes as a constant: one kernel serves every way to store a weight.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

ALL = 1 << 30  # rows or columns of a block that is the whole weight
PLAIN = "plain"  # instead of a kind of codes: the weight itself


@triton.jit
def e2m1(code):
    """The float32 of a code of four bits: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    half = tl.where(mantissa == 1, 0x3F000000, 0)  # below one: 0 or 0.5
    bits = tl.where(exponent == 0, half, ((exponent + 126) << 23) | (mantissa << 22))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(code):
    """The float32 of an 8-bit float: sign, four bits of exponent, three of mantissa; 0x7F and 0xFF are NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    small = mantissa.to(tl.float32) * 0.001953125  # 2^-9
    bits = ((exponent + 120) << 23) | (mantissa << 20)
    bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits)
    bits = tl.where(exponent == 0, small.to(tl.int32, bitcast=True), bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e5m2(code):
    """The float32 of an 8-bit float that is the upper half of a float16."""
    exponent, mantissa = (code >> 2) & 31, code & 3
    small = mantissa.to(tl.float32) * 1.52587890625e-05  # 2^-16
    bits = tl.where(exponent == 31, 0x7F800000, (exponent + 112) << 23) | (mantissa << 21)
    bits = tl.where(exponent == 0, small.to(tl.int32, bitcast=True), bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0(byte):
    """2^(byte - 127); 255 is NaN."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def number(code, CODE: tl.constexpr):
    """The float32 of a code, in an int32."""
    if CODE == "e2m1":
        return e2m1(code)
    elif CODE == "int4":
        return (code - 8).to(tl.float32)
    elif CODE == "int2":
        return (code - 2).to(tl.float32)
    elif CODE == "int8":
        return ((code ^ 0x80) - 0x80).to(tl.float32)
    elif CODE == "e4m3":
        return e4m3(code)
    else:
        tl.static_assert(CODE == "e5m2", "no such codes")
        return e5m2(code)


@triton.jit
def weight_tile(
    codes_row,  # [1, n] pointers to the first code of each row
    scales_row,  # [1, n] pointers to the first scale of each row; not read of a plain weight
    zeros_row,  # [1, n] pointers to the first zero point of each row; not read unless HAS_ZEROS
    outer_row,  # [1, n] pointers to the scale of each row's scales; not read unless OUTER says how
    order_row,  # [1, n] pointers to the group of the first column; not read unless HAS_ORDER
    inner,  # [m, 1] columns
    mask,
    dtype: tl.constexpr,
    UPCAST: tl.constexpr,  # bfloat16 in float32: the interpreter does not round to it, it cuts off
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,  # codes a byte
    SCALE_COLUMNS: tl.constexpr,
    SCALE_KIND: tl.constexpr,  # float, e8m0 or e4m3
    HAS_ZEROS: tl.constexpr,
    OUTER: tl.constexpr,  # none, times or by
    HAS_ORDER: tl.constexpr,
):
    """The numbers [m, n] of a tile in `dtype`, rounded once; zero where the mask is not set."""
    if CODE == "plain":
        tile = tl.load(codes_row + inner, mask=mask, other=0.0)
    else:
        code = tl.load(codes_row + inner // PER_BYTE, mask=mask, other=0).to(tl.int32)
        if PER_BYTE > 1:
            BITS: tl.constexpr = 8 // PER_BYTE
            code = (code >> ((inner % PER_BYTE) * BITS)) & ((1 << BITS) - 1)
        if HAS_ORDER:
            group = tl.load(order_row + inner, mask=mask, other=0)
        else:
            group = inner // SCALE_COLUMNS
        value = number(code, CODE)
        if HAS_ZEROS:
            value -= tl.load(zeros_row + group, mask=mask, other=0).to(tl.float32)
        factor = scale(tl.load(scales_row + group, mask=mask, other=0), SCALE_KIND)
        if OUTER != "none":
            outer = tl.load(outer_row + inner * 0, mask=mask, other=1.0)
            factor = factor * outer if OUTER == "times" else tl.div_rn(factor, outer)
        number_32 = tl.where(mask, value * factor, 0.0)
        if UPCAST:
            bits = number_32.to(tl.int32, bitcast=True)
            tile = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        else:
            tile = number_32.to(dtype)
    return tile


@triton.jit
def scale(stored, KIND: tl.constexpr):
    """The float32 of a scale."""
    if KIND == "e8m0":
        return e8m0(stored.to(tl.int32))
    elif KIND == "e4m3":
        return e4m3(stored.to(tl.int32))
    else:
        return stored.to(tl.float32)
