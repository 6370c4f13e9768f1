"""Reference of the router: plain torch, the truth that every other implementation is compared with.

Legend: T tokens, E experts, k chosen experts, G groups of E / G neighbouring experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]


def router_topk(
    logits_TE: Tensor,
    correction_bias_E: Tensor | None,
    top_k: int,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: GroupScore = "top2_sum",
    scale: float = 1.0,
    softmax_after: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token: (weights [T, k] float32, ids [T, k] int64).

    `logits_TE` [T, E] becomes scores by softmax over E or by sigmoid, in float32. The bias [E] takes part in the
    choice and not in the weights. With `num_groups` > 1 only experts of the `topk_groups` best groups can be chosen;
    a group counts as its best expert or as the sum of its two best. `normalize` divides the weights by their sum
    (+1e-20); `scale` comes last. With `softmax_after` the choice is by logit and the weights are a softmax over the
    chosen logits. The order of the k columns, and the choice among exactly equal scores, are not part of the
    contract. Mixtral and Qwen3-MoE: softmax, normalize; GPT-OSS: softmax_after; DeepSeek-V2: softmax, groups by max,
    scale; DeepSeek-V3 and Kimi-K2 (arXiv:2412.19437): sigmoid, bias, groups by top2_sum, normalize, scale. Not
    covered: noisy and hash routers.
    """
    logits_TE = logits_TE.float()
    if softmax_after:
        scores_TE = logits_TE
    else:
        scores_TE = logits_TE.softmax(dim=-1) if scoring == "softmax" else logits_TE.sigmoid()
    wanted_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E
    if num_groups > 1:
        wanted_TE = _only_best_groups(wanted_TE, num_groups, topk_groups, group_score)
    ids_Tk = torch.topk(wanted_TE, top_k, dim=-1).indices
    weights_Tk = scores_TE.gather(-1, ids_Tk)
    if softmax_after:
        weights_Tk = weights_Tk.softmax(dim=-1)
    elif normalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_Tk * scale, ids_Tk


def _only_best_groups(wanted_TE: Tensor, num_groups: int, topk_groups: int, group_score: GroupScore) -> Tensor:
    """Put -inf on every expert outside the best groups."""
    by_group_TGe = wanted_TE.unflatten(-1, (num_groups, -1))
    if group_score == "max":
        score_TG = by_group_TGe.amax(dim=-1)
    else:
        score_TG = by_group_TGe.topk(2, dim=-1).values.sum(dim=-1)
    best_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    best_TG.scatter_(-1, score_TG.topk(topk_groups, dim=-1).indices, True)
    return by_group_TGe.masked_fill(~best_TG.unsqueeze(-1), float("-inf")).flatten(-2)
