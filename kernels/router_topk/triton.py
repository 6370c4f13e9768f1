"""The router in Triton: one program per token, everything in registers.

Legend: T tokens, E experts, k chosen experts, G groups.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _best(value, index, NONE: tl.constexpr):
    """The largest value and the lowest index that has it."""
    largest = tl.max(value, axis=0)
    return largest, tl.min(tl.where(value == largest, index, NONE), axis=0)


@triton.jit
def _scored(x, SCORING: tl.constexpr):
    """Sigmoid, or sqrt(softplus), of each logit."""
    if SCORING == "sigmoid":
        return tl.sigmoid(x)
    else:
        tl.static_assert(SCORING == "sqrtsoftplus", "a scoring that the kernel does not know")
        return tl.sqrt(tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def _router_kernel(
    logits_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    ids_ptr,
    row_stride,
    scale,
    eps,
    floor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_BY_MAX: tl.constexpr,
    SCORE_CHOSEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    real = expert < EXPERTS
    logits = tl.load(logits_ptr + token * row_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SCORE_CHOSEN:
        scores = logits
    elif SCORING == "softmax":
        share = tl.exp(logits - tl.max(logits, axis=0))
        scores = share / tl.sum(share, axis=0)
    else:
        scores = _scored(logits, SCORING)
    wanted = scores
    if HAS_BIAS:
        wanted = scores + tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    wanted = tl.where(real, wanted, float("-inf"))

    if GROUPS > 1:
        group_of = expert // (EXPERTS // GROUPS)
        group = tl.arange(0, BLOCK_G)
        group_score = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(group_of == g, wanted, float("-inf"))
            score, place = _best(own, expert, BLOCK_E)
            if not GROUP_BY_MAX:
                score += tl.max(tl.where(expert == place, float("-inf"), own), axis=0)
            group_score = tl.where(group == g, score, group_score)
        allowed = tl.zeros((BLOCK_E,), tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            _score, best_group = _best(group_score, group, BLOCK_G)
            allowed = tl.where(group_of == best_group, 1, allowed)
            group_score = tl.where(group == best_group, float("-inf"), group_score)
        wanted = tl.where(allowed == 1, wanted, float("-inf"))

    column = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.full((BLOCK_K,), float("-inf") if SCORE_CHOSEN else 0.0, tl.float32)
    open_ = tl.where(real, 1, 0)  # a chosen expert is closed, also where every score is -inf
    for i in tl.static_range(TOP_K):
        candidate = tl.where(open_ == 1, wanted, float("-inf"))
        largest = tl.max(candidate, axis=0)
        place = tl.min(tl.where((candidate == largest) & (open_ == 1), expert, BLOCK_E), axis=0)
        if IS_CHOSEN:
            place = tl.load(chosen_ptr + token * TOP_K + i).to(tl.int32)
        weight = tl.sum(tl.where(expert == place, scores, 0.0), axis=0)
        chosen = tl.where(column == i, place, chosen)
        weights = tl.where(column == i, weight, weights)
        open_ = tl.where(expert == place, 0, open_)
    kept = column < TOP_K
    if SCORE_CHOSEN and SCORING == "softmax":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    else:
        if SCORE_CHOSEN:
            weights = tl.where(kept, _scored(tl.where(kept, weights, 0.0), SCORING), 0.0)
        if NORMALIZE:
            weights = weights / tl.maximum(tl.sum(weights, axis=0) + eps, floor)
    tl.store(weights_ptr + token * TOP_K + column, weights * scale, mask=kept)
    tl.store(ids_ptr + token * TOP_K + column, chosen.to(tl.int64), mask=kept)


def router_topk(
    logits_TE: Tensor,
    correction_bias_E: Tensor | None,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2_sum",
    scale: float = 1.0,
    score_chosen: bool = False,
    eps: float = 1e-20,
    floor: float = 0.0,
    chosen_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts: (weights, ids), see the reference for the contract; equal scores go to the lower expert."""
    num_tokens, num_experts = logits_TE.shape
    weights_Tk = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    ids_Tk = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if num_tokens == 0:
        return weights_Tk, ids_Tk
    if logits_TE.stride(-1) != 1:
        logits_TE = logits_TE.contiguous()
    _router_kernel[(num_tokens,)](
        logits_TE,
        logits_TE if correction_bias_E is None else correction_bias_E,
        ids_Tk if chosen_Tk is None else chosen_Tk.contiguous(),
        weights_Tk,
        ids_Tk,
        logits_TE.stride(0),
        scale,
        eps,
        floor,
        EXPERTS=num_experts,
        TOP_K=top_k,
        SCORING=scoring,
        NORMALIZE=normalize,
        HAS_BIAS=correction_bias_E is not None,
        IS_CHOSEN=chosen_Tk is not None,
        GROUPS=num_groups,
        TOPK_GROUPS=topk_groups,
        GROUP_BY_MAX=group_score == "max",
        SCORE_CHOSEN=score_chosen,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_G=triton.next_power_of_2(num_groups),
        num_warps=1 if num_experts <= 256 else 2,
    )
    return weights_Tk, ids_Tk
