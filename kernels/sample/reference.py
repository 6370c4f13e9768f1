"""Reference of sampling: plain torch, the truth that every other implementation is compared with.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Choose one token per row: ids [B] int64.

    `logits_BV` [B, V]; `temperature_B` 0 means the largest logit (the lowest id among equals); `top_k_B` 0 and
    `top_p_B` 1 mean no limit. Tokens are ranked by logit, descending and by id among equals; top-k keeps the first k,
    top-p the shortest prefix whose share of what top-k kept reaches p (never less than one token); the draw inverts
    the cumulative distribution over the ranked tokens at `uniform_B` in [0, 1). So a row's token depends on that row
    and its uniform number alone, never on the batch around it. Not covered: penalties, min-p.
    """
    greedy_B = temperature_B <= 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B.float()).unsqueeze(-1)
    ranked_BV, order_BV = torch.sort(scaled_BV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(ranked_BV.shape[-1], device=ranked_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, ranked_BV.shape[-1])
    kept_BV = rank_V < limit_B.unsqueeze(-1)
    share_BV = ranked_BV.masked_fill(~kept_BV, float("-inf")).softmax(dim=-1)
    cumulative_BV = share_BV.cumsum(dim=-1)
    kept_BV &= cumulative_BV - share_BV < top_p_B.float().unsqueeze(-1)
    kept_BV |= rank_V == 0
    count_B = kept_BV.sum(dim=-1)
    total_B1 = cumulative_BV.gather(-1, (count_B - 1).unsqueeze(-1))
    drawn_B = (cumulative_BV <= uniform_B.float().unsqueeze(-1) * total_B1).sum(dim=-1)
    place_B = torch.minimum(drawn_B, count_B - 1).masked_fill(greedy_B, 0)
    return order_BV.gather(-1, place_B.unsqueeze(-1)).squeeze(-1)


def uniforms(seeds: Sequence[int], steps: Sequence[int]) -> list[float]:
    """Make the uniform number of step i of a request with a seed: the same on every device, in any batch, in [0, 1).

    SplitMix64 (Steele, Lea and Flood, 2014) of the pair, 24 bits kept, so that float32 holds it exactly.
    """
    return [
        (_splitmix64(_splitmix64(seed & _MASK) ^ (step & _MASK)) >> 40) / 2**24
        for seed, step in zip(seeds, steps, strict=True)
    ]


_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
