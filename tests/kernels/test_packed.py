"""Codes and scales unpacked in torch and in Triton: every code and every scale there is, by another way each time."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firstlight.kernels.linear.native import NativeLinear
from firstlight.kernels.native.build import available, has_bf16_dot
from firstlight.kernels.packed import codes, native, reference
from firstlight.kernels.packed.cases import Form
from firstlight.kernels.packed.kinds import CODE_BITS
from firstlight.kernels.packed.matrix import PackedMatrix
from tests.kernels.test_cases import INTERPRET
from tests.reference import mxfp4

if INTERPRET:
    import triton
    import triton.language as tl

    from firstlight.kernels.packed.decode import e8m0, number

    @triton.jit
    def decode(numbers_ptr, factors_ptr, CODE: tl.constexpr, COUNT: tl.constexpr):
        code = tl.arange(0, COUNT)
        tl.store(numbers_ptr + code, number(code, CODE))
        byte = tl.arange(0, 256)
        tl.store(factors_ptr + byte, e8m0(byte))


BYTES = torch.arange(256, dtype=torch.uint8)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_every_byte_and_every_scale_of_mxfp4() -> None:
    packed = BYTES.repeat(256, 1)  # 512 columns: sixteen groups a row, all with the row's scale
    scales = BYTES.unsqueeze(1).expand(256, 16).contiguous()
    matrix = PackedMatrix(packed, scales, "e2m1", (1, 32), 512)
    for unpack in (reference.unpack, codes.unpack):
        found = unpack(matrix)
        assert found[255].isnan().all()
        assert torch.equal(found[:255], mxfp4.dequantize(packed, scales)[:255])


@pytest.mark.parametrize("code", sorted(TORCH))
def test_bytes_are_what_torch_says_they_are(code: str) -> None:
    wanted = BYTES.view(TORCH[code]).float()
    assert same(torch.tensor(reference.numbers_of(code)), wanted)
    matrix = PackedMatrix(BYTES.unsqueeze(0), torch.ones(1, 1), code, (1, 0), 256)
    assert same(codes.unpack(matrix)[0], wanted)


@pytest.mark.parametrize(
    ("code", "block", "shape"),
    [("int4", (1, 16), (5, 40)), ("int4", (1, 0), (3, 24)), ("e4m3", (4, 16), (10, 40)), ("int8", (0, 0), (6, 9)),
     ("e5m2", (3, 5), (7, 11))],
)  # fmt: skip
def test_the_fast_way_gives_the_bits_of_the_table(code: str, block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Blocks and words that end early too; and a part of the rows is that part of the whole."""
    random = torch.Generator().manual_seed(3)
    row_bytes = -(-shape[1] * CODE_BITS[code] // 32) * 4
    raw = torch.randint(0, 256, (shape[0], row_bytes), dtype=torch.uint8, generator=random)
    grid = [-(-size // per) if per else 1 for size, per in zip(shape, block, strict=True)]
    scales = torch.rand(grid, generator=random).to(torch.bfloat16)
    matrix = PackedMatrix(raw.view(torch.int32), scales, code, block, shape[1])
    wanted = reference.unpack(matrix)
    assert wanted.shape == shape
    assert same(codes.unpack(matrix), wanted)
    start = max(block[0], 1)
    assert same(codes.unpack(matrix.part(start, shape[0])), wanted[start:])


FORMS = {
    "two levels, whole rows by fours": Form("e2m1", (1, 16), torch.float8_e4m3fn, outer="by", together=3),
    "groups that end inside 32 columns": Form("int4", (1, 48), torch.float16, zero=torch.int8),
    "groups of whole bytes": Form("int4", (1, 18), torch.float16, zero=torch.int8),
    "groups that begin inside a byte": Form("int2", (1, 17), torch.float16, zero=torch.int8),
    "whole numbers in groups": Form("int8", (1, 48), torch.bfloat16, zero=torch.int8),
    "floats in groups": Form("e4m3", (1, 40), torch.uint8),
    "floats with zero points": Form("e4m3", (2, 32), torch.float32, zero=torch.int8),
    "half floats, rows": Form("e5m2", (1, 0), torch.float32),
    "whole numbers in any order": Form("int8", (1, 32), torch.float16, zero=torch.int8, ordered=True),
    "floats in any order of many groups": Form("e4m3", (1, 12), torch.float16, ordered=True),
    "any order of very many groups": Form("int2", (1, 4), torch.float16, zero=torch.int8, ordered=True),
    "any order": Form("int4", (1, 16), torch.bfloat16, zero=torch.int8, ordered=True, together=4),
    "exponents": Form("e2m1", (1, 32), torch.uint8),
    "no groups": Form("int4", (1, 0), torch.float32, zero=torch.int8),
    "blocks": Form("e4m3", (4, 32), torch.bfloat16),
    "two bits": Form("int2", (1, 16), torch.float16, zero=torch.int8),
}


@pytest.mark.skipif(not available()[0], reason=available()[1])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_native_way_gives_the_bits_of_the_table_rounded_once(form: Form) -> None:
    """32 columns at a time, and those behind."""
    for columns in (20, 63, 100, 160, 1000):
        matrix = form.make((9, columns), torch.Generator().manual_seed(columns), torch.device("cpu"))
        assert native.is_read(matrix)
        assert same(native.unpack(matrix, torch.bfloat16), reference.unpack(matrix).bfloat16())


@pytest.mark.skipif(not available()[0], reason=available()[1])
@pytest.mark.parametrize("code", sorted(CODE_BITS))
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_every_code_natively(code: str, scale: float) -> None:
    """NaN and infinity among them, and a scale with which nothing may overflow on the way."""
    codes_8 = BYTES[: 256 if code != "e5m2" or scale == 1.0 else 0x7B]
    count = len(codes_8) * 8 // CODE_BITS[code]
    matrix = PackedMatrix(codes_8.unsqueeze(0).contiguous(), torch.full((1, 1), scale), code, (1, 0), count)
    assert same(native.unpack(matrix, torch.bfloat16), reference.unpack(matrix).bfloat16())


@pytest.mark.skipif(not available()[0], reason=available()[1])
@pytest.mark.parametrize("form", [FORMS["blocks"], FORMS["any order"], FORMS["no groups"]], ids=str)
def test_a_packed_layer_gives_the_bits_of_the_unpacked_one(form: Form) -> None:
    """Whatever the number of rows of both: keeping a weight packed changes no token."""
    if not has_bf16_dot():
        pytest.skip("without dot products of bfloat16 the compiler orders the sums of each")
    random = torch.Generator().manual_seed(5)
    for columns, rows in ((100, 13), (2500, 6)):
        matrix = form.make((rows, columns), random, torch.device("cpu"))
        bias_F = torch.randn(rows, generator=random).bfloat16()
        plain = NativeLinear(native.unpack(matrix, torch.bfloat16), bias_F)
        for tokens in (1, 3, 5, 31):
            x_TH = torch.randn(tokens, columns, generator=random).bfloat16()
            assert torch.equal(native.linear_packed(x_TH, matrix, bias_F), plain(x_TH)), (columns, tokens)


def test_an_order_that_is_none_is_left_out() -> None:
    form = Form("int4", (1, 16), zero=torch.int8, ordered=True)
    matrix = form.make((5, 40), torch.Generator().manual_seed(1), torch.device("cpu"))
    assert matrix.in_order() is matrix
    sorted_ = replace(matrix, order=(torch.arange(40, dtype=torch.int32) // 16).unsqueeze(0))
    assert sorted_.in_order().order is None
    assert torch.equal(codes.unpack(sorted_.in_order()), reference.unpack(sorted_))


def test_a_matrix_whose_parts_do_not_fit_is_no_matrix() -> None:
    raw, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1)
    with pytest.raises(ValueError, match="scales"):
        PackedMatrix(raw, scales, "int4", (1, 16), 32)
    with pytest.raises(ValueError, match="too few"):
        PackedMatrix(raw, scales, "int4", (1, 0), 33)
    with pytest.raises(ValueError, match="no codes are called int3"):
        PackedMatrix(raw, scales, "int3", (1, 0), 32)


@pytest.mark.skipif(not INTERPRET, reason="Triton kernels run on a CPU only when they are interpreted")
@pytest.mark.parametrize("code", sorted(CODE_BITS))
def test_triton_decodes_the_same_bits(code: str) -> None:
    count = 1 << CODE_BITS[code]
    numbers, factors = torch.empty(count), torch.empty(256)
    decode[(1,)](numbers, factors, code, count)
    assert same(numbers, torch.tensor(reference.numbers_of(code)))
    assert factors[255].isnan()
    assert torch.equal(factors[:255], torch.exp2(torch.arange(255).double() - 127).float())
