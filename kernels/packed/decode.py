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
    inner,  # [m, 1] columns
    mask,
    dtype: tl.constexpr,
    UPCAST: tl.constexpr,  # bfloat16 in float32: the interpreter does not round to it, it cuts off
    CODE: tl.constexpr,
    IS_NARROW: tl.constexpr,  # two codes a byte
    SCALE_COLUMNS: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
):
    """The numbers [m, n] of a tile in `dtype`, rounded once; zero where the mask is not set."""
    if CODE == "plain":
        tile = tl.load(codes_row + inner, mask=mask, other=0.0)
    else:
        if IS_NARROW:
            byte = tl.load(codes_row + inner // 2, mask=mask, other=0).to(tl.int32)
            code = (byte >> ((inner % 2) * 4)) & 15
        else:
            code = tl.load(codes_row + inner, mask=mask, other=0).to(tl.int32)
        scale = tl.load(scales_row + inner // SCALE_COLUMNS, mask=mask, other=0)
        if HAS_EXPONENTS:
            factor = e8m0(scale.to(tl.int32))
        else:
            factor = scale.to(tl.float32)
        number_32 = tl.where(mask, number(code, CODE) * factor, 0.0)
        if UPCAST:
            bits = number_32.to(tl.int32, bitcast=True)
            tile = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        else:
            tile = number_32.to(dtype)
    return tile
