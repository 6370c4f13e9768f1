"""Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1): the cache holds latents only.

Legend: T tokens, H hidden, N heads, L latent rank, R rotated dims, C = L + R cached dims, D nope dims, V value dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.rope import angles


class MLA:
    """x [T, H] -> [T, H]; this rank's heads, summed over tp. The latent [latent | rotated key] goes to `cache` first.

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
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        kv_b = weights.tensor("kv_b.weight").view(-1, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self._key_NDL, self._value_NVL = kv_b.split((spec.nope_dim, spec.v_dim), dim=1)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, ops, tokens = self.spec, batch.ops, x_TH.shape[0]
        low_TQ = self._q_a_norm(self._q_a(x_TH)) if self._q_a is not None and self._q_a_norm is not None else x_TH
        q_nope_TND, q_rope_TNR = (
            self._q(low_TQ).view(tokens, -1, spec.nope_dim + spec.rope_dim).split((spec.nope_dim, spec.rope_dim), -1)
        )
        latent_TL, k_rope_TR = self._kv_a(x_TH).split((spec.kv_lora_rank, spec.rope_dim), dim=-1)
        latent_T1L, k_rope_T1R = self._kv_a_norm(latent_TL).unsqueeze(1), k_rope_TR.unsqueeze(1)
        if spec.rope is not None:
            q_rope_TNR, k_rope_T1R = ops.rotary(
                q_rope_TNR, k_rope_T1R, *angles(spec.rope, batch), spec.rope.interleaved
            )
        q_latent_TNL = torch.einsum("tnd,ndl->tnl", q_nope_TND, self._key_NDL)
        q_TNC = torch.cat((q_latent_TNL, q_rope_TNR), dim=-1)
        k_T1C = torch.cat((latent_T1L, k_rope_T1R), dim=-1)
        (k_cache,) = cache
        v_cache = k_cache[..., : spec.kv_lora_rank]
        ops.write_cache(k_T1C, latent_T1L, k_cache, v_cache, batch.attention)
        out_TNL = ops.attention(q_TNC, k_cache, v_cache, batch.attention, spec.scale)
        out_TNV = torch.einsum("tnl,nvl->tnv", out_TNL, self._value_NVL)
        out_TH = batch.comms.tp.all_reduce(self._o(out_TNV.reshape(tokens, -1)))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H
