"""Reference of the router: plain torch, the truth that every other implementation is compared with.

Legend: T tokens, E experts, k chosen experts, G groups of E / G neighbouring experts.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
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
    score_chosen: bool = False,
    eps: float = 1e-20,
    floor: float = 0.0,
    chosen_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token: (weights [T, k] float32, ids [T, k] int64).

    `logits_TE` [T, E] becomes scores in float32: softmax over E, sigmoid, or sqrt(softplus). The bias [E] takes part in
    the choice and not in the weights. With `num_groups` > 1 only experts of the `topk_groups` best groups can be
    chosen; a group counts as its best expert or as the sum of its two
    best. `normalize` divides the weights by their sum + `eps`, or by `floor` where that is larger; `scale` comes last.
    With `score_chosen` the choice is by logit, and scores are taken of the chosen logits alone. `chosen_Tk` [T, k] is a
    choice made elsewhere (by a table of token ids). The order of the k columns, and the choice among exactly equal
    scores, are not part of the contract.

    Mixtral and Qwen3-MoE: softmax, normalize; GPT-OSS and Granite: softmax of the chosen; DeepSeek-V2: softmax, groups
    by max, scale; DeepSeek-V3 and Kimi-K2 (arXiv:2412.19437): sigmoid, bias, groups by top2_sum, normalize, scale;
    DeepSeek-V4: sqrtsoftplus. Not covered: noise, and `sparsemixer` (below).
    """
    logits_TE = logits_TE.float()
    scores_TE = logits_TE if score_chosen else _scores(logits_TE, scoring)
    if chosen_Tk is None:
        wanted_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E
        if num_groups > 1:
            wanted_TE = _only_best_groups(wanted_TE, num_groups, topk_groups, group_score)
        chosen_Tk = torch.topk(wanted_TE, top_k, dim=-1).indices
    weights_Tk = scores_TE.gather(-1, chosen_Tk)
    if score_chosen:
        weights_Tk = _scores(weights_Tk, scoring)
    if normalize and not (score_chosen and scoring == "softmax"):
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + eps).clamp_min(floor)
    return weights_Tk * scale, chosen_Tk


def _scores(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    if scoring == "softmax":
        return logits_TE.softmax(dim=-1)
    return logits_TE.sigmoid() if scoring == "sigmoid" else F.softplus(logits_TE).sqrt()


def sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts a token, one after the other (Phi-3.5-MoE; arXiv:2409.12136, at inference): (weights, ids), [T, 2].

    An expert's weight is its softmax among those that are still there and whose logit falls short of the best by at
    most 2 `jitter`, measured in its own size or the best's. It depends on no device: the one implementation.
    """
    logits_TE = logits_TE.float()
    left_TE, weights, ids = logits_TE, [], []
    for _ in range(2):
        best_T1, id_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        share_TE = left_TE.masked_fill(far_TE, float("-inf")).softmax(dim=-1)
        weights.append(share_TE.gather(-1, id_T1))
        ids.append(id_T1)
        left_TE = left_TE.scatter(-1, id_T1, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)


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
