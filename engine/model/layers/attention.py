"""Grouped-query attention over the cache. Legend: T tokens, H hidden, N query heads, K key/value heads, D head dim."""

from __future__ import annotations

from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.rope import angles
from firstlight.engine.model.spec import Attention as AttentionSpec


class Attention:
    """x [T, H] -> [T, H]; this rank's heads, summed over tp. Keys and values go to `cache` (k, v) first."""

    def __init__(self, spec: AttentionSpec, weights: Access) -> None:
        self.spec = spec
        self._qkv = weights.linear("qkv")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        self._sinks_N = weights.maybe("sinks")
        self._q_norm = Norm(spec.qk_norm, weights.into("q_norm")) if spec.qk_norm else None
        self._k_norm = Norm(spec.qk_norm, weights.into("k_norm")) if spec.qk_norm else None
        self._num_heads = weights.tensor("o.weight").shape[1] // spec.head_dim
        rows = weights.tensor("qkv.weight").shape[0]
        self._num_kv_heads = (rows // spec.head_dim - self._num_heads) // 2

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, ops, tokens = self.spec, batch.ops, x_TH.shape[0]
        heads = self._qkv(x_TH).view(tokens, -1, spec.head_dim)
        q_TND, k_TKD, v_TKD = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q_TND, k_TKD = self._q_norm(q_TND), self._k_norm(k_TKD)
        if spec.rope is not None:
            q_TND, k_TKD = ops.rotary(q_TND, k_TKD, *angles(spec.rope, batch), spec.rope.interleaved)
        k_cache, v_cache = cache
        ops.write_cache(k_TKD, v_TKD, k_cache, v_cache, batch.attention)
        out_TND = ops.attention(
            q_TND, k_cache, v_cache, batch.attention, spec.scale, spec.window, spec.softcap, self._sinks_N
        )
        out_TH = batch.comms.tp.all_reduce(self._o(out_TND.reshape(tokens, -1)))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H
