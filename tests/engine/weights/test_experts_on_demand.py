"""Experts that are read when tokens choose them: the same numbers, within the budget, the oldest ones go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading import arriving
from tests.engine.direct import Direct
from tests.engine.weights.holding import Get, Held, inputs, least, same

pytestmark = pytest.mark.usefixtures("small_staging")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("room", ["least", "half"])
def test_experts_on_demand_give_the_same_numbers(
    name: str, room: str, checkpoint: Get, held: Callable[..., Held]
) -> None:
    """With room for one expert each goes by itself; with room for half of them the ones in use stay."""
    path = checkpoint(name)
    whole = Direct(path)
    smallest = least(path, "experts", held)
    role_bytes = whole.weights.pieces.bytes_by_role()["expert"]
    budget = smallest if room == "least" else smallest + role_bytes // 2
    cached = held(path, "experts", budget)
    for one in inputs(3):
        same(cached.run(one), whole.run(one))
        cached.weights.experts.check()
    report = cached.weights.residency()
    assert report.held_bytes <= budget
    assert report.misses > 0
    if room == "least":
        assert report.units == 1
        return
    token = {"input_ids": inputs()[0]["input_ids"][:1, :1]}
    cached.run(token)
    before = cached.weights.residency()
    cached.run(token)
    again = cached.weights.residency()
    assert again.hits > before.hits, "the same token finds its experts"
    assert (again.misses, again.fetched_bytes) == (before.misses, before.fetched_bytes)
    assert again.waited_s == before.waited_s > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_no_bit_depends_on_how_many_experts_have_room(name: str, share: float, checkpoint: Get) -> None:
    """In bfloat16, where sums of what was rounded on the way would show."""

    def logits(**options: Any) -> np.ndarray:
        engine = Engine.start(str(checkpoint(name)), dtype="BF16", max_context=32, threads=1, **options)
        try:
            return engine.trace(inputs()[0]["input_ids"])["logits"]
        finally:
            engine.close()

    with pytest.raises(Refused) as caught:
        logits(residency="experts", weights_budget=1)
    low = int(str(caught.value.findings[0].expected).split()[2].replace(",", ""))
    wanted = logits()
    np.testing.assert_array_equal(logits(residency="experts", weights_budget=int(low * (1 + share))), wanted)


def test_one_rank_of_several_holds_its_own_experts(checkpoint: Get, held: Callable[..., Held]) -> None:
    path = checkpoint("qwen3_moe")
    cached = held(path, "experts", None, Mesh(ep=2)).weights
    whole = rank_pieces(FAMILIES.describe(Checkpoint.open(path).config)[0], Mesh(ep=2), 0, "F32")
    site = next(storage.name.rpartition("experts.")[0] for storage in whole.storages if arriving.is_expert(storage))
    assert cached.experts.experts(site) == next(s.shape[0] for s in whole.storages if arriving.is_expert(s))
    ids = torch.tensor([[0, 99], [-1, 1]])
    seen: list[torch.Tensor] = []

    def call(
        places_M: torch.Tensor, slots_M1: torch.Tensor, tensors: dict[str, torch.Tensor], experts_C: torch.Tensor
    ) -> torch.Tensor:
        seen.append(places_M)
        assert experts_C[slots_M1[:, 0]].tolist() == [0, 1]
        return torch.tensor([[1.0], [2.0]])

    assert cached.experts.routed(site, ids, 0, call).tolist() == [[1.0], [2.0]]
    (places,) = seen
    assert places.tolist() == [0, 3], "another rank's expert is not asked for"

    def none_of(places_M: torch.Tensor, slots_M1: torch.Tensor, *_: object) -> torch.Tensor:
        assert (places_M.numel(), slots_M1.shape, slots_M1.dtype) == (0, (0, 1), ids.dtype)
        return torch.zeros(0, 1)

    before = cached.experts.report()
    assert cached.experts.routed(site, torch.tensor([[99, -1]]), 0, none_of).tolist() == [[0.0]]
    assert cached.experts.report() == before, "a token whose experts are all of other ranks reads nothing"


def test_a_dense_model_has_no_experts_to_fetch(checkpoint: Get, held: Callable[..., Held]) -> None:
    with pytest.raises(Refused, match="no experts"):
        held(checkpoint("llama"), "experts", None)
