"""The indexer of sparse attention: which keys each token attends to (DeepSeek-V3.2, arXiv 2512.02556).

Legend: T tokens, t tokens and L keys of one sequence, Q width of the query's latent, N index heads, D index head dim,
k keys chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

    Its own keys go to `cache` first. Scores are computed in float32. Which of two keys with exactly the same score is
    chosen is torch's affair, and depends on how long the row of scores is: see `best`.
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
            scores_tL = torch.einsum("tn,tnl->tl", weights_TN[rows], scores_tNL)
            scores_tL = scores_tL.masked_fill(~visible(query_len, meta.kv_lens[b], None, x_TH.device), float("-inf"))
            columns, rows_of_scores = width(meta, spec), row_lengths(batch, b)
            found += [best(scores_tL[part], columns, row) for part, row in rows_of_scores]
            start += query_len
        return torch.cat(found)


def width(meta: AttentionMeta, spec: specs.Indexer) -> int:
    """Number of keys chosen per token in this step: at most as many as there are keys."""
    return min(spec.topk, meta.max_kv_len)


def row_lengths(batch: ForwardBatch, b: int) -> list[tuple[slice, int]]:
    """How long the reference's row of scores is for tokens of sequence b: as the sequence, or as a padded batch.

    Where `prompt_lens` says what the prompt is: as long as that for its tokens, and for others up to themselves.
    """
    count, stop = batch.attention.query_lens[b], batch.attention.kv_lens[b]
    if batch.prompt_lens is None:
        return [(slice(0, count), max(stop, batch.rope_lens[b] if batch.rope_lens else 0))]
    start, prompt = stop - count, batch.prompt_lens[b]
    asked = min(max(prompt - start, 0), count)
    alone = [(slice(i, i + 1), start + i + 1) for i in range(asked, count)]
    return [(slice(0, asked), prompt), *alone] if asked else alone


def best(scores_tL: Tensor, columns: int, row: int) -> Tensor:
    """Places of the best finite scores, int64 [t, columns], -1 for none.

    Scores of exactly zero are common (no head looks at the key). torch chooses among equals by their places in a row of
    `row` scores, which is the same here and in a reference that pads, so that comparisons are not about that.
    """
    scores_tR = F.pad(scores_tL, (0, row - scores_tL.shape[1]), value=float("-inf"))
    values_tk, chosen_tk = scores_tR.topk(min(columns, row), dim=-1)
    chosen_tk = chosen_tk.masked_fill(values_tk == float("-inf"), -1)
    return F.pad(chosen_tk, (0, columns - chosen_tk.shape[1]), value=-1)


def marks(chosen_tk: Tensor, keys: int) -> Tensor:
    """Places [t, k] as a mask: bool [t, keys]."""
    found = torch.zeros(len(chosen_tk), keys + 1, dtype=torch.bool, device=chosen_tk.device)
    return found.scatter_(1, chosen_tk.where(chosen_tk >= 0, keys), True)[:, :keys]


def chosen_keys(chosen_Tk: Tensor, meta: AttentionMeta) -> tuple[Tensor, ...]:
    """Positions [T, k] as `selective_attention` takes them: bool [t, L] a sequence."""
    seen, start = [], 0
    for query_len, kv_len in zip(meta.query_lens, meta.kv_lens, strict=True):
        seen.append(marks(chosen_Tk[start : start + query_len], kv_len))
        start += query_len
    return tuple(seen)
