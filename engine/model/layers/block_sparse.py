"""The indexer of block-sparse attention: which blocks of keys each head attends to (MiniMax-M3, arXiv 2606.13392).

Legend: T tokens, t tokens and L keys of one sequence, H hidden, N query heads on this rank, G index heads, D index head
dim, M blocks of a sequence, S keys a block.
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


class BlockIndexer:
    """x [T, H] -> the keys that each head of each token sees, one bool [G, t, L] a sequence; None: all before it.

    Its own keys go to `cache` first. Scores are computed in float32.
    """

    def __init__(self, spec: specs.BlockIndexer, weights: Access) -> None:
        self.spec = spec
        self._q, self._k = weights.linear("q"), weights.linear("k")
        self._q_norm, self._k_norm = Norm(spec.norm, weights.into("q_norm")), Norm(spec.norm, weights.into("k_norm"))

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: Tensor) -> list[Tensor] | None:
        spec, meta = self.spec, batch.attention
        q_TGD = self._q_norm(self._q(x_TH).unflatten(-1, (spec.num_heads, spec.head_dim)))
        k_T1D = self._k_norm(self._k(x_TH)).unsqueeze(1)
        if spec.rope is not None:
            q_TGD, k_T1D = batch.ops.rotary(q_TGD, k_T1D, *angles(spec.rope, batch), spec.rope.interleaved)
        batch.ops.write_cache(k_T1D, k_T1D[..., :1], cache, cache[..., :1], meta)
        if meta.max_kv_len <= spec.block * spec.topk:  # fewer blocks than would be chosen: all of them
            return None
        found, start = [], 0
        for b, query_len in enumerate(meta.query_lens):
            k_LD = cached(cache, meta, b)[0]
            found.append(self._seen(q_TGD[start : start + query_len].float(), k_LD.float(), meta, b))
            start += query_len
        return found

    def _seen(self, q_tGD: Tensor, k_LD: Tensor, meta: AttentionMeta, b: int) -> Tensor:
        spec, query_len, kv_len = self.spec, meta.query_lens[b], meta.kv_lens[b]
        before_tL = visible(query_len, kv_len, None, q_tGD.device)
        scores_GtL = torch.einsum("tgd,ld->gtl", q_tGD, k_LD).masked_fill(~before_tL, float("-inf"))
        scores_GtL = F.pad(scores_GtL, (0, -kv_len % spec.block), value=float("-inf"))
        scores_GtM = scores_GtL.unflatten(-1, (-1, spec.block)).amax(dim=-1)
        own_t1 = torch.arange(kv_len - query_len, kv_len, device=q_tGD.device)[:, None] // spec.block
        block_M = torch.arange(scores_GtM.shape[-1], device=q_tGD.device)
        scores_GtM = scores_GtM.masked_fill((block_M <= own_t1) & (block_M > own_t1 - spec.local), float("inf"))
        values, chosen = scores_GtM.topk(min(spec.topk, len(block_M)), dim=-1)
        seen_GtM = torch.zeros_like(scores_GtM, dtype=torch.bool).scatter_(-1, chosen, values > float("-inf"))
        return seen_GtM.repeat_interleave(spec.block, dim=-1)[..., :kv_len] & before_tL


def of_heads(seen: list[Tensor], num_heads: int, first: int, local: int) -> list[Tensor]:
    """The choices [G, t, L] as those of this rank's heads, [N, t, L]: `local` of `num_heads` from `first` on."""
    heads_N = torch.arange(first, first + local, device=seen[0].device)
    return [seen_GtL[heads_N // (num_heads // len(seen_GtL))] for seen_GtL in seen]
