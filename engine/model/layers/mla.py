"""Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1): the cache holds latents only.

Legend: T tokens, H hidden, N heads, Q width of the query's latent, L latent rank, R rotated dims, C = L + R cached
dims, D nope dims, V value dims, k keys chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.division import write_cache
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.attention import sharpened
from firstlight.engine.model.layers.indexer import Indexer, chosen_keys
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.rope import angles


class MLA:
    """x [T, H] -> [T, H]; this rank's heads, summed over ranks. [latent | rotated key] goes to `cache` first.

    q k^T = (q_nope W_k) c + q_rope k_rope: the key expansion is moved to the query side, the value expansion behind
    the attention, so that every head attends to the one cached latent.
    """

    def __init__(self, spec: specs.MLA, weights: Access) -> None:
        self.spec = spec
        self._q = weights.linear("q") if spec.q_lora_rank is None else weights.linear("q_b")
        self._q_a = weights.linear("q_a") if spec.q_lora_rank is not None else None
        self._q_a_norm = Norm(spec.norm, weights.into("q_a_norm")) if spec.q_lora_rank is not None else None
        self._kv_a = weights.linear("kv_a")
        self._kv_a_norm = Norm(spec.norm, weights.into("kv_a_norm"))
        self._gate = weights.linear("g") if spec.gated else None
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        kv_b = weights.tensor("kv_b.weight").view(-1, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self._key_NDL, self._value_NVL = kv_b.split((spec.nope_dim, spec.v_dim), dim=1)
        self._indexer = Indexer(spec.indexer, weights.into("indexer")) if spec.indexer and spec.indexer.own else None

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        low_TQ = x_TH
        if self._q_a is not None and self._q_a_norm is not None:
            low_TQ = self._q_a_norm(self._q_a(x_TH))
        q_TNC, k_T1C = self._projected(x_TH, low_TQ, batch)
        latents, rank = cache[0], self.spec.kv_lora_rank
        write_cache(k_T1C, k_T1C[..., :rank], latents, latents[..., :rank], batch, in_key=rank)
        if self._indexer is not None:
            batch.handed["chosen"] = self._indexer(x_TH, low_TQ, batch, cache[1])
        out_TNL = self._attend(q_TNC, latents, batch)
        out_TV = torch.einsum("tnl,nvl->tnv", out_TNL, self._value_NVL).flatten(1)
        if self._gate is not None:
            gate_TV = torch.sigmoid(self._gate(x_TH))
            out_TV = out_TV * (gate_TV.repeat_interleave(self.spec.v_dim, -1) if self.spec.gate_by_head else gate_TV)
        out_TH = batch.comms.heads.all_reduce(self._o(out_TV))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H

    def _projected(self, x_TH: Tensor, low_TQ: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Queries as they meet the cached latents, and what this step adds to those."""
        spec = self.spec
        widths = (spec.nope_dim, spec.rope_dim)
        q_nope_TND, q_rope_TNR = self._q(low_TQ).unflatten(-1, (-1, sum(widths))).split(widths, -1)
        latent_TL, k_rope_TR = self._kv_a(x_TH).split((spec.kv_lora_rank, spec.rope_dim), dim=-1)
        latent_T1L, k_rope_T1R = self._kv_a_norm(latent_TL).unsqueeze(1), k_rope_TR.unsqueeze(1)
        if spec.kv_scale != 1.0:
            latent_T1L = latent_T1L * spec.kv_scale
        if spec.rope is not None:
            q_rope_TNR, k_rope_T1R = batch.ops.rotary(
                q_rope_TNR, k_rope_T1R, *angles(spec.rope, batch), spec.rope.interleaved
            )
        q_latent_TNL = torch.einsum("tnd,ndl->tnl", q_nope_TND, self._key_NDL)
        q_TNC = torch.cat((q_latent_TNL, q_rope_TNR), dim=-1)
        if spec.temperature is not None:
            q_TNC = sharpened(q_TNC, spec.temperature, batch)
        return q_TNC, torch.cat((latent_T1L, k_rope_T1R), dim=-1)

    def _attend(self, q_TNC: Tensor, latents: Tensor, batch: ForwardBatch) -> Tensor:
        spec, meta = self.spec, batch.attention
        values = latents[..., : spec.kv_lora_rank]
        if spec.indexer is None or meta.max_kv_len <= spec.indexer.topk:  # fewer keys than would be chosen: all of them
            return batch.ops.attention(q_TNC, latents, values, meta, spec.scale)
        seen = chosen_keys(batch.handed["chosen"], meta)
        return batch.ops.selective_attention(q_TNC, latents, values, meta, spec.scale, seen)
