"""The router against transformers' own, on random logits, biases and shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    Kolibri1Config,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer as theirs_sparsemixer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from firstlight.kernels.registry import implementations
from firstlight.kernels.router_topk.cases import by_expert
from firstlight.kernels.router_topk.reference import sparsemixer

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
@settings(max_examples=12)
def test_mixtral(name: str, seed: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    config = MixtralConfig(hidden_size=24, num_local_experts=experts, num_experts_per_tok=top_k)
    theirs = routed(MixtralTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, experts=st.integers(2, 40), normalize=st.booleans(), data=st.data())
@settings(max_examples=12)
def test_qwen3_moe(name: str, seed: int, experts: int, normalize: bool, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(8, experts)))
    config = Qwen3MoeConfig(hidden_size=24, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=normalize)
    theirs = routed(Qwen3MoeTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k, normalize=normalize), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, group_size=st.integers(2, 6), groups=st.integers(1, 6), normalize=st.booleans(), data=st.data())
@settings(max_examples=20)
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
@settings(max_examples=6)
def test_gpt_oss(name: str, seed: int, top_k: int) -> None:
    config = GptOssConfig(hidden_size=24, num_local_experts=12, num_experts_per_tok=top_k)
    theirs = routed(GptOssTopKRouter(config), seed)
    same(ROUTERS[name](theirs[0], None, top_k, score_chosen=True), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, top_k=st.integers(1, 6), least=st.floats(1e-6, 0.9))
@settings(max_examples=8)
def test_ernie_divides_by_no_less_than_its_floor(name: str, seed: int, top_k: int, least: float) -> None:
    router = Ernie4_5_MoeTopKRouter(
        Ernie4_5_MoeConfig(hidden_size=24, moe_num_experts=12, moe_k=top_k, moe_norm_min=least)
    )
    theirs = routed(router, seed)
    bias = router.moe_statics.e_score_correction_bias.detach()[0]
    same(ROUTERS[name](theirs[0], bias, top_k, eps=0.0, floor=least), theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, top_k=st.integers(1, 6), normalize=st.booleans())
@settings(max_examples=8)
def test_kolibri_chooses_by_logit_and_bias(name: str, seed: int, top_k: int, normalize: bool) -> None:
    router = Kolibri1TopKRouter(
        Kolibri1Config(hidden_size=24, num_local_experts=12, num_experts_per_tok=top_k, norm_topk_prob=normalize)
    )
    theirs = routed(router, seed)
    bias = router.e_score_correction_bias
    ours = ROUTERS[name](theirs[0], bias, top_k, "sigmoid", normalize, score_chosen=True, eps=0.0)
    same(ours, theirs)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=seeds, top_k=st.integers(1, 6), scoring=st.sampled_from(("sqrtsoftplus", "sigmoid")))
@settings(max_examples=8)
def test_deepseek_v4(name: str, seed: int, top_k: int, scoring: str) -> None:
    """By score and bias, and by a table of token ids."""
    config = DeepseekV4Config(
        hidden_size=24, n_routed_experts=12, num_experts_per_tok=top_k, scoring_func=scoring, vocab_size=31
    )
    router = DeepseekV4TopKRouter(config)
    theirs = routed(router, seed)
    scale = config.routed_scaling_factor
    same(ROUTERS[name](theirs[0], router.e_score_correction_bias, top_k, scoring, scale=scale), theirs)
    table = DeepseekV4HashRouter(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        table.weight.copy_(torch.randn(table.weight.shape, generator=random))
        table.tid2eid.copy_(torch.rand(31, 12, generator=random).argsort(-1)[:, :top_k])
        ids = torch.randint(31, (5,), generator=random)
        theirs = table(torch.randn(5, 24, generator=random), ids)
    chosen = table.tid2eid[ids]
    same(ROUTERS[name](theirs[0], None, top_k, scoring, scale=scale, chosen_Tk=chosen), theirs)


@given(seed=seeds, experts=st.integers(2, 20), jitter=st.floats(0.0, 2.0), size=st.sampled_from((0.1, 1.0, 30.0)))
@settings(max_examples=40)
def test_sparsemixer(seed: int, experts: int, jitter: float, size: float) -> None:
    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(seed)) * size
    weights, ids = sparsemixer(logits, jitter)
    expected, expected_ids = theirs_sparsemixer(logits, jitter, training=False)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


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
