"""Sampling: limits, independence of rows, and the shares that repeated draws must have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.kernels.registry import choose
from firstlight.kernels.sample.reference import uniforms

NAMES = ("reference", "cpu")


def sample(
    name: str, logits: torch.Tensor, temperature: float, top_p: float, top_k: int, uniform: list[float]
) -> list[int]:
    ops = choose("cpu", torch.float32, force={"sample": name})
    rows = len(uniform)
    return ops.sample(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        torch.tensor(uniform),
    ).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_the_softmax(name: str) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    grid = [(i + 0.5) / 4000 for i in range(4000)]
    drawn = torch.tensor(sample(name, logits, 0.5, 1.0, 0, grid)).bincount(minlength=4) / 4000
    torch.testing.assert_close(drawn, (logits / 0.5).softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_limits(name: str) -> None:
    logits = torch.tensor([0.0, 4.0, 3.0, 2.0, 1.0])
    grid = [i / 500 for i in range(500)]
    assert set(sample(name, logits, 1.0, 1.0, 2, grid)) == {1, 2}
    assert set(sample(name, logits, 1.0, 0.6, 0, grid)) == {1}
    assert set(sample(name, logits, 1.0, 0.7, 0, grid)) == {1, 2}
    assert set(sample(name, logits, 1.0, 0.0, 0, grid)) == {1}
    assert set(sample(name, logits, 0.0, 1.0, 0, grid)) == {1}
    assert set(sample(name, logits, 1.0, 1.0, 99, grid)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", NAMES)
def test_equal_logits_rank_by_id(name: str) -> None:
    assert sample(name, torch.zeros(600), 0.0, 1.0, 0, [0.9]) == [0]
    assert sample(name, torch.zeros(600), 1.0, 1.0, 3, [0.0, 0.5, 0.99]) == [0, 1, 2]
    assert sample(name, torch.zeros(600), 1.0, 1.0, 0, [0.5]) == [300]


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 50, 255, 256, 257, 900]),
)
@settings(max_examples=80)
def test_candidates_give_what_a_full_sort_gives(
    seed: int, spread: float, temperature: float, top_p: float, top_k: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(900, generator=random) * spread).to(torch.bfloat16).float()  # many equal ones
    uniform = torch.rand(6, generator=random).tolist()
    assert sample("cpu", logits, temperature, top_p, top_k, uniform) == sample(
        "reference", logits, temperature, top_p, top_k, uniform
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_feel_its_neighbours(name: str) -> None:
    ops = choose("cpu", torch.float32, force={"sample": name})
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 700, generator=random)
    rows = (
        torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0, 3.0]),
        torch.tensor([1.0, 0.9, 1.0, 0.5, 0.0, 0.99]),
        torch.tensor([0, 0, 5, 300, 1, 0]),
        torch.rand(6, generator=random),
    )
    together = ops.sample(logits, *rows)
    alone = [ops.sample(logits[i : i + 1], *(row[i : i + 1] for row in rows)).item() for i in range(6)]
    assert together.tolist() == alone


def test_uniform_numbers() -> None:
    """Fixed for all time (a recorded run must replay), spread evenly, different between seeds and steps."""
    assert uniforms([0, 1, 2**63], [0, 5, 7]) == [0.6524484753608704, 0.6924455761909485, 0.5271778106689453]
    many = torch.tensor(uniforms([7] * 20000, list(range(20000))))
    assert many.min() >= 0
    assert many.max() < 1
    counts = torch.histc(many, bins=20, min=0, max=1)
    assert ((counts - 1000).abs() < 150).all()
    assert len(set(many.tolist())) > 19900
    assert abs(float(torch.corrcoef(torch.stack((many[:-1], many[1:])))[0, 1])) < 0.02
