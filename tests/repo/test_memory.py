"""Memory that was not written is NaN in every test (tests/conftest.py), so that an operator cannot rely on zeros."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_empty_is_nan(dtype: torch.dtype) -> None:
    ones = torch.ones(3, 5, dtype=torch.float32).to(dtype)
    for made in (
        torch.empty(3, 5, dtype=dtype),
        torch.empty_like(ones),
        ones.new_empty(3, 5),
        torch.empty_strided((3, 5), (5, 1), dtype=dtype),
        torch.empty(3, 5, dtype=dtype, pin_memory=False),
    ):
        assert made.float().isnan().all()


def test_empty_integers_are_large() -> None:
    """An index that was never written points far outside."""
    assert (torch.empty(7, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
