"""Sampling on CPUs without sorting the vocabulary: the best few candidates nearly always hold the answer.

Legend: B sequences, V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.sample import reference

NUM_CANDIDATES = 256


def sample(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Choose one token per row (see the reference for the contract).

    The draw is made among the best `NUM_CANDIDATES`; a row whose draw falls outside them, or among logits equal to the
    last of them, goes to the reference.
    """
    greedy_B = temperature_B <= 0
    ids_B = logits_BV.argmax(dim=-1)
    drawn = torch.nonzero(~greedy_B).flatten()
    if drawn.numel() == 0:
        return ids_B
    rows = (logits_BV[drawn].float(), temperature_B[drawn], top_p_B[drawn], top_k_B[drawn], uniform_B[drawn])
    candidate_b, sure_b = _from_candidates(*rows)
    ids_B[drawn] = candidate_b
    unsure = torch.nonzero(~sure_b).flatten()
    if unsure.numel():
        ids_B[drawn[unsure]] = reference.sample(*(one[unsure] for one in rows))
    return ids_B


def _from_candidates(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw among the best candidates: (ids, whether the whole vocabulary would have given the same)."""
    vocabulary = logits_BV.shape[-1]
    count = min(NUM_CANDIDATES, vocabulary)
    scaled_BV = logits_BV / temperature_B.float().unsqueeze(-1)
    value_BC, id_BC = _ranked(scaled_BV, count)
    rank_C = torch.arange(count)
    limited_B = (top_k_B > 0) & (top_k_B < vocabulary)
    limit_B = torch.where(limited_B, top_k_B, vocabulary)
    kept_BC = rank_C < limit_B.unsqueeze(-1)
    limited_lse_B = value_BC.masked_fill(~kept_BC, float("-inf")).logsumexp(dim=-1)
    lse_B = torch.where(limited_B, limited_lse_B, scaled_BV.logsumexp(dim=-1))
    share_BC = (value_BC - lse_B.unsqueeze(-1)).exp().masked_fill_(~kept_BC, 0.0)
    cumulative_BC = share_BC.cumsum(dim=-1)
    kept_BC &= cumulative_BC - share_BC < top_p_B.float().unsqueeze(-1)
    kept_BC |= rank_C == 0
    last_B = kept_BC.sum(dim=-1) - 1
    ends_inside_B = (last_B < count - 1) | (limit_B <= count) | (count == vocabulary)
    total_B = torch.where(ends_inside_B, cumulative_BC.gather(-1, last_B.unsqueeze(-1)).squeeze(-1), 1.0)
    drawn_B = (cumulative_BC <= (uniform_B.float() * total_B).unsqueeze(-1)).sum(dim=-1)
    place_B1 = torch.minimum(drawn_B, last_B).unsqueeze(-1)
    above_cut_B = (value_BC.gather(-1, place_B1) > value_BC[:, -1:]).squeeze(-1) | (count == vocabulary)
    sure_B = above_cut_B & (ends_inside_B | (top_p_B >= 1) & ~limited_B) & (~limited_B | (limit_B < count))
    return id_BC.gather(-1, place_B1).squeeze(-1), sure_B


def _ranked(scaled_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best candidates in the reference's order: by value, equals by id."""
    id_BC = scaled_BV.topk(count, dim=-1).indices.sort(dim=-1).values
    value_BC, order_BC = scaled_BV.gather(-1, id_BC).sort(dim=-1, descending=True, stable=True)
    return value_BC, id_BC.gather(-1, order_BC)
