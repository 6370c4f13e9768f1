"""Noise, ties and faults are told apart, and nothing hides behind a large number or behind NaN."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.workbench.compare import deviation, divergence, divergence_limit, limit_of, ranking


def test_equal_arrays_deviate_by_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    found = deviation(x, x)
    assert (found.relative, found.max_abs, found.mean_abs) == (0.0, 0.0, 0.0)
    assert found.cosine == pytest.approx(1.0)
    assert found.passes(0.0)


def test_a_huge_token_does_not_hide_a_fault_in_another() -> None:
    theirs = np.ones((4, 8), dtype=np.float32)
    theirs[0] = 5000.0  # an attention sink
    ours = theirs.copy()
    ours[2, 3] += 0.5
    found = deviation(ours, theirs)
    assert found.overall == pytest.approx(1e-4), "over the whole array it looks like noise"
    assert found.cosine > 0.9999999
    assert found.row == 2
    assert not found.passes(1e-3)


def test_a_row_of_almost_nothing_is_not_blown_up() -> None:
    theirs = np.ones((2, 4), dtype=np.float64)
    theirs[1] = 1e-12
    assert deviation(theirs + 1e-8, theirs).passes(1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_fails_with_its_place(value: float) -> None:
    theirs = np.zeros((3, 4), dtype=np.float32)
    ours = theirs.copy()
    ours[1, 2] = value
    found = deviation(ours, theirs)
    assert not found.passes(np.inf)
    assert "token 1, channel 2; 1 values" in found.broken


def test_a_flip_at_a_near_tie_is_no_fault() -> None:
    theirs = np.array([[5.0, 4.9999, 0.0], [5.0, 3.0, 0.0], [1.0, 5.0, 0.0]])
    ours = np.array([[4.9999, 5.0, 0.0], [3.0, 5.0, 0.0], [1.0, 5.0, 0.0]])
    found = ranking(ours, theirs, 1e-3, top_n=1)
    assert found.agree == 1
    assert found.ties == (0,)
    assert found.faults == (1,)
    assert found.strangers == (1,)
    assert found.overlap == pytest.approx(1 / 3)


def test_divergence_is_that_of_its_definition() -> None:
    draw = np.random.default_rng(1)
    theirs, ours = draw.standard_normal((6, 11)), draw.standard_normal((6, 11))
    p = np.exp(theirs) / np.exp(theirs).sum(axis=1, keepdims=True)
    q = np.exp(ours) / np.exp(ours).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(divergence(ours, theirs), (p * np.log(p / q)).sum(axis=1), rtol=1e-9)
    assert divergence(theirs + 100.0, theirs).max() < 1e-12, "a constant on all logits changes nothing"


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e-2))
def test_deviations_within_the_limit_stay_within_the_divergence_that_follows(seed: int, limit: float) -> None:
    draw = np.random.default_rng(seed)
    theirs = draw.standard_normal((3, 20)) * 10
    noise = draw.uniform(-1, 1, theirs.shape) * limit * np.abs(theirs).max(axis=1, keepdims=True)
    assert divergence(theirs + noise, theirs).max() <= divergence_limit(theirs, limit)
    assert not ranking(theirs + noise, theirs, limit).faults


def test_limits_grow_with_the_rounding_of_the_dtype() -> None:
    assert limit_of("F32") == 1e-3
    assert limit_of("F32") < limit_of("F16") < limit_of("BF16") < 0.2
