"""The indexer of sparse attention: which keys each token attends to (DeepSeek-V3.2, arXiv 2512.02556).

Legend: T tokens, t tokens and L keys of one sequence, Q width of the query's latent, N index heads, D index head dim,
k keys chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.rope import angles
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.attention.reference import cached, visible


class Indexer:
    """x [T, H] and the query's latent [T, Q] -> positions [T, k] of the keys to attend to; -1 where there are fewer.

    Its own keys go to `cache` first. Scores are computed in float32; which of two keys with exactly the same score is
    chosen is not part of the contract.
    """

    def __init__(self, spec: specs.Indexer, weights: Access) -> None:
        self.spec = spec
        self._q, self._k, self._weights = weights.linear("q"), weights.linear("k"), weights.linear("weights")
        self._k_norm = Norm(spec.norm, weights.into("k_norm"))

    def __call__(self, x_TH: Tensor, latent_TQ: Tensor, batch: ForwardBatch, cache: Tensor) -> Tensor:
        spec, meta = self.spec, batch.attention
        q_TND = self._q(latent_TQ).unflatten(-1, (spec.num_heads, spec.head_dim))
        k_T1D = self._k_norm(self._k(x_TH)).unsqueeze(1)
        if spec.rope is not None:
            q_TND, k_T1D = batch.ops.rotary(q_TND, k_T1D, *angles(spec.rope, batch), spec.rope.interleaved)
        batch.ops.write_cache(k_T1D, k_T1D[..., :1], cache, cache[..., :1], meta)
        weights_TN = self._weights(x_TH).float() * (spec.num_heads * spec.head_dim) ** -0.5
        found, start = [], 0
        for b, query_len in enumerate(meta.query_lens):
            rows = slice(start, start + query_len)
            k_LD = cached(cache, meta, b)[0].float()
            scores_tNL = torch.relu(torch.einsum("tnd,ld->tnl", q_TND[rows].float(), k_LD))
            found.append(_best(torch.einsum("tn,tnl->tl", weights_TN[rows], scores_tNL), width(meta, spec)))
            start += query_len
        return torch.cat(found)


def width(meta: AttentionMeta, spec: specs.Indexer) -> int:
    """Columns of a choice in this step: no more than there are keys."""
    return min(spec.topk, meta.max_kv_len)


def _best(scores_tL: Tensor, columns: int) -> Tensor:
    """Positions of the best keys at or before each token, int64 [t, columns], -1 for none."""
    query_len, kv_len = scores_tL.shape
    scores_tL = scores_tL.masked_fill(~visible(query_len, kv_len, None, scores_tL.device), float("-inf"))
    values_tk, chosen_tk = scores_tL.topk(min(columns, kv_len), dim=-1)
    chosen_tk = chosen_tk.masked_fill(values_tk == float("-inf"), -1)
    return torch.nn.functional.pad(chosen_tk, (0, columns - chosen_tk.shape[1]), value=-1)


def chosen_keys(chosen_Tk: Tensor, meta: AttentionMeta) -> tuple[Tensor, ...]:
    """Positions [T, k] as `selective_attention` takes them: bool [t, L] a sequence."""
    seen, start = [], 0
    for query_len, kv_len in zip(meta.query_lens, meta.kv_lens, strict=True):
        own_tk = chosen_Tk[start : start + query_len]
        marks = torch.zeros(query_len, kv_len + 1, dtype=torch.bool, device=chosen_Tk.device)
        marks.scatter_(1, own_tk.where(own_tk >= 0, kv_len), True)
        seen.append(marks[:, :kv_len])
        start += query_len
    return tuple(seen)
