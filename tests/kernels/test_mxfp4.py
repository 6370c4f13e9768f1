"""MXFP4 codes and scales unpacked in torch and in Triton, each byte and each scale there is."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import pytest
import torch

from firstlight.kernels.moe_mxfp4 import reference
from tests.kernels.test_cases import INTERPRET
from tests.reference import mxfp4

if INTERPRET:
    import triton
    import triton.language as tl

    from firstlight.kernels.moe_mxfp4.triton import e2m1, e8m0

    @triton.jit
    def decode(numbers_ptr, factors_ptr):
        code = tl.arange(0, 16)
        tl.store(numbers_ptr + code, e2m1(code))
        byte = tl.arange(0, 256)
        tl.store(factors_ptr + byte, e8m0(byte))


BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_byte_and_every_scale() -> None:
    codes = BYTES.repeat(256, 1)  # 512 columns: sixteen groups a row, all with the row's scale
    scales = BYTES.unsqueeze(1).expand(256, 16)
    found = reference.unpack(codes, scales)
    assert found[255].isnan().all()
    assert torch.equal(found[:255], mxfp4.dequantize(codes, scales)[:255])


def test_numbers_that_are_packed_come_back() -> None:
    weight = torch.tensor([reference.MAGNITUDES[i % 8] * (-1) ** (i // 8) for i in range(64)]).repeat(3, 1)
    weight *= torch.tensor([0.25, 1.0, 512.0]).unsqueeze(1)
    assert torch.equal(reference.unpack(*mxfp4.quantize(weight)), weight)


@pytest.mark.skipif(not INTERPRET, reason="Triton kernels run on a CPU only when they are interpreted")
def test_triton_decodes_the_same_bits() -> None:
    numbers, factors = torch.empty(16), torch.empty(256)
    decode[(1,)](numbers, factors)
    assert torch.equal(numbers, torch.tensor([*mxfp4.MAGNITUDES, *(-value for value in mxfp4.MAGNITUDES)]))
    assert factors[255].isnan()
    assert torch.equal(factors[:255], torch.exp2(torch.arange(255).double() - 127).float())
