"""The router against transformers' own, on random logits, biases and shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from firstlight.kernels.registry import implementations
from firstlight.kernels.router_topk.cases import by_expert

ROUTERS = {one.name: one.load() for one in implementations("router_topk") if one.name in ("reference", "triton")}
seeds = st.integers(0, 2**32 - 1)


def routed(router: torch.nn.Module, seed: int, hidden: int = 24, tokens: int = 5) -> tuple[torch.Tensor, ...]:
    """Run a router of transformers with random weights and buffers: (logits, weights, ids)."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        return router(torch.randn(tokens, hidden, generator=random))


def same(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, ...]) -> None:
    weights, ids = by_expert(*ours)
    _, expected, expected_ids = theirs
    expected, expected_ids = by_expert(expected, expected_ids)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, experts=st.integers(2, 20), data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_mixtral(name: str, seed: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    config = MixtralConfig(hidden_size=24, num_local_experts=experts, num_experts_per_tok=top_k)
    theirs = routed(MixtralTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, experts=st.integers(2, 40), normalize=st.booleans(), data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_qwen3_moe(name: str, seed: int, experts: int, normalize: bool, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(8, experts)))
    config = Qwen3MoeConfig(hidden_size=24, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=normalize)
    theirs = routed(Qwen3MoeTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k, normalize=normalize), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, group_size=st.integers(2, 6), groups=st.integers(1, 6), normalize=st.booleans(), data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_deepseek_v3(name: str, seed: int, group_size: int, groups: int, normalize: bool, data: st.DataObject) -> None:
    best = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, best * group_size))
    config = DeepseekV3Config(
        hidden_size=24,
        n_routed_experts=groups * group_size,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=best,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    theirs = routed(router, seed)
    ours = ROUTERS[name](
        theirs[0],
        router.e_score_correction_bias,
        top_k,
        scoring="sigmoid",
        normalize=normalize,
        num_groups=groups,
        topk_groups=best,
        scale=2.5,
    )
    same(ours, theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, top_k=st.integers(1, 6))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_gpt_oss(name: str, seed: int, top_k: int) -> None:
    config = GptOssConfig(hidden_size=24, num_local_experts=12, num_experts_per_tok=top_k)
    theirs = routed(GptOssTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k, score_chosen=True), theirs)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_bias_chooses_and_does_not_weigh(name: str) -> None:
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 100.0])
    weights, ids = by_expert(*ROUTERS[name](logits, bias, 2, scoring="sigmoid", normalize=False))
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


@pytest.mark.parametrize("name", ROUTERS)
def test_no_expert_is_chosen_twice_when_scores_are_equal(name: str) -> None:
    _, ids = ROUTERS[name](torch.zeros(3, 10), None, 6)
    assert all(len(set(row)) == 6 for row in ids.tolist())
