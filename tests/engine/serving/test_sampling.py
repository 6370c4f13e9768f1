"""Tokens are drawn as transformers draws them, and what a checkpoint asks for beyond that is said."""

import json
import shutil
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.sampling import choose_tokens
from firstlight.engine.serving.steps import Draw
from firstlight.kernels.registry import choose

DRAWS, VOCABULARY = 6000, 60


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.6, 0.8, 0), (1.0, 1.0, 7), (0.9, 0.7, 12), (2.0, 0.95, 1000)],
)
def test_draws_are_distributed_as_transformers_has_it(temperature: float, top_p: float, top_k: int) -> None:
    """The same tokens are possible, and chi-square finds no other frequencies (seeds are fixed: 1 in 1,000)."""
    logits_1V = 2 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    warped_1V = TemperatureLogitsWarper(temperature)(None, logits_1V) if temperature != 1 else logits_1V
    if top_k:
        warped_1V = TopKLogitsWarper(min(top_k, VOCABULARY))(None, warped_1V)
    if top_p < 1:
        warped_1V = TopPLogitsWarper(top_p)(None, warped_1V)
    expected_V = warped_1V.softmax(-1)[0].double() * DRAWS
    draws = [Draw(temperature, top_p, top_k, seed, -1) for seed in range(DRAWS)]
    ops = choose(torch.device("cpu"), torch.float32, {"hidden": 8, "vocabulary": VOCABULARY, "page_size": 16})
    ids_R = choose_tokens(logits_1V.expand(DRAWS, -1).contiguous(), draws, [seed % 5 for seed in range(DRAWS)], ops)
    found_V = torch.bincount(ids_R, minlength=VOCABULARY).double()
    assert found_V[expected_V == 0].sum() == 0, "a token that transformers never draws"
    often_V = expected_V >= 5
    pairs = [(found_V[often_V], expected_V[often_V]), (found_V[~often_V].sum()[None], expected_V[~often_V].sum()[None])]
    chi_square = sum(((found - wanted) ** 2 / wanted.clamp(min=1e-9)).sum() for found, wanted in pairs)
    freedom = torch.tensor(float(often_V.sum()), dtype=torch.float64)
    assert torch.special.gammaincc(freedom / 2, torch.as_tensor(chi_square, dtype=torch.float64) / 2) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("odd", "is_sound", "is_sound_masked"),
    [
        ((), True, True),
        ((nan,), False, False),
        ((inf,), False, False),
        ((-inf,), False, True),
        ((1e38,) * 9, True, True),
    ],
)
def test_no_token_is_made_of_logits_with_a_number_that_is_a_fault(
    temperature: float, odd: tuple[float, ...], is_sound: bool, is_sound_masked: bool
) -> None:
    """However many finite ones stand beside it; sums that leave the range of finite numbers are none."""
    logits_RV = torch.linspace(-1, 1, 40).repeat(2, 1)
    logits_RV[1, 5 : 5 + len(odd)] = torch.tensor(odd)
    draws = [Draw(temperature, 1.0, 0, 3, -1)] * 2
    ops = choose(torch.device("cpu"), torch.float32, {"hidden": 8, "vocabulary": 40, "page_size": 16})
    for may_mask, sound in ((False, is_sound), (True, is_sound_masked)):
        first, second = choose_tokens(logits_RV, draws, [0, 0], ops, may_mask).tolist()
        assert first >= 0, "a neighbour's fault is none of its own"
        assert (second >= 0) == sound
    assert choose_tokens(torch.full((1, 40), -inf), draws[:1], [0], ops, may_mask=True).item() < 0, "nothing is left"


def test_what_a_checkpoint_asks_for_in_vain_is_told_by_the_engine(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    home = tmp_path / "asking"
    shutil.copytree(checkpoint("llama"), home)
    (home / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.2}))
    engine = Engine.start(str(home), dtype="F32", max_context=32, threads=1)
    engine.close()
    (finding,) = (one for one in engine.info().findings if one.code == "generation-default")
    assert "repetition_penalty 1.2" in finding.message
