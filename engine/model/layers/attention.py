"""Grouped-query attention over the cache.

Legend: T tokens, t tokens and L keys of one sequence, H hidden, N query heads, K key/value heads, D head dim, V value
head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.division import write_cache
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.block_sparse import BlockIndexer, of_heads
from firstlight.engine.model.layers.norm import QK_NORMS, Norm
from firstlight.engine.model.layers.rope import angles
from firstlight.engine.model.spec import Alibi, Temperature
from firstlight.engine.model.spec import Attention as AttentionSpec
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.attention.reference import visible

GATES = {
    "sigmoid": torch.sigmoid,
    "softplus": lambda gate: torch.nn.functional.softplus(gate.float()).to(gate.dtype),
}


class Attention:
    """x [T, H] -> [T, H]; this rank's heads, summed over ranks. Keys and values go to `cache` (k, v) first."""

    def __init__(self, spec: AttentionSpec, weights: Access) -> None:
        self.spec = spec
        self._qkv = weights.linear("qkv")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        self._sinks_N = weights.maybe("sinks")
        self._gate = weights.linear("gate") if spec.gate in ("own", "head") else None
        norm = QK_NORMS[spec.qk_norm_over]
        self._q_norm = norm(spec.qk_norm, weights.into("q_norm")) if spec.qk_norm else None
        self._k_norm = norm(spec.qk_norm, weights.into("k_norm")) if spec.qk_norm and spec.keys_of is None else None
        self._v_norm = Norm(spec.v_norm, weights.into("v_norm")) if spec.v_norm else None
        self._blocks = BlockIndexer(spec.blocks, weights.into("blocks")) if spec.blocks else None
        value_rows = 0 if spec.keys_as_values else spec.value_dim
        rows, key_value = weights.rows("qkv"), spec.head_dim + value_rows
        self._query_rows = (spec.head_dim, spec.value_dim if spec.gate == "query" else 0)
        q_rows = weights.columns("o") // spec.value_dim * sum(self._query_rows)
        num_kv_heads = (rows - q_rows) // key_value
        self._rows = (q_rows, num_kv_heads * spec.head_dim, num_kv_heads * value_rows)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        q_TND, k_TKD, v_TKV, gate_TNV = self._projected(x_TH, batch)
        k_cache, v_cache = cache[:2]
        if self.spec.keys_of is None:
            write_cache(k_TKD, v_TKV, k_cache, v_cache, batch)
        chosen = None if self._blocks is None else self._blocks(x_TH, batch, cache[2])
        out_TNV = self._attend(q_TND, k_cache, v_cache, batch, chosen)
        if self.spec.v_scale != 1.0:
            out_TNV = out_TNV * self.spec.v_scale
        if gate_TNV is not None:
            out_TNV = out_TNV * GATES[self.spec.gate_by](gate_TNV)
        out_TH = batch.comms.heads.all_reduce(self._o(out_TNV.reshape(x_TH.shape[0], -1)))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H

    def _projected(self, x_TH: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values after norms, clamping, rotation and scaling; and the gate."""
        spec = self.spec
        qkv_TF = self._qkv(x_TH)
        q_TF, k_TF, v_TF = self._by_head(qkv_TF) if spec.fused else qkv_TF.split(self._rows, dim=-1)
        q_TND, gate_TNV = q_TF.unflatten(-1, (-1, sum(self._query_rows))).split(self._query_rows, dim=-1)
        if spec.keys_of is not None:  # in place of keys, which another layer has written
            k_TF = v_TF = q_TF[:, : spec.head_dim]
        k_TKD = k_TF.unflatten(-1, (-1, spec.head_dim))
        v_TKV = k_TKD if spec.keys_as_values else v_TF.unflatten(-1, (-1, spec.value_dim))
        if not spec.qk_norm_last:
            q_TND, k_TKD = self._normed(q_TND, k_TKD, batch)
        if spec.clip is not None:
            q_TND, k_TKD, v_TKV = (part.clamp(-spec.clip, spec.clip) for part in (q_TND, k_TKD, v_TKV))
        if spec.rope is not None:
            q_TND, k_TKD = batch.ops.rotary(q_TND, k_TKD, *angles(spec.rope, batch), spec.rope.interleaved)
        if spec.qk_norm_last:
            q_TND, k_TKD = self._normed(q_TND, k_TKD, batch)
        if spec.temperature is not None:
            q_TND = sharpened(q_TND, spec.temperature, batch)
        v_TKV = v_TKV if self._v_norm is None else self._v_norm(v_TKV)
        if self._gate is not None:
            size = 1 if spec.gate == "head" else spec.value_dim
            return q_TND, k_TKD, v_TKV, self._gate(x_TH).unflatten(-1, (-1, size))
        return q_TND, k_TKD, v_TKV, gate_TNV if spec.gate else None

    def _by_head(self, qkv_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from a projection that is grouped by key head."""
        heads = self._rows[1] // self.spec.head_dim
        parts = qkv_TF.unflatten(-1, (heads, -1)).split([rows // heads for rows in self._rows], dim=-1)
        q_TF, k_TF, v_TF = (part.flatten(1) for part in parts)
        return q_TF, k_TF, v_TF

    def _normed(self, q_TND: Tensor, k_TKD: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        over = batch.comms.heads
        q_TND = q_TND if self._q_norm is None else self._q_norm(q_TND, over)
        return q_TND, k_TKD if self._k_norm is None else self._k_norm(k_TKD, over)

    def _attend(
        self, q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, chosen: list[Tensor] | None
    ) -> Tensor:
        spec, meta = self.spec, batch.attention
        seen = self._seen(q_TND, batch, chosen)
        if seen is None:
            return batch.ops.attention(
                q_TND, k_cache, v_cache, meta, spec.scale, spec.window, spec.softcap, self._sinks_N
            )
        return batch.ops.selective_attention(
            q_TND, k_cache, v_cache, meta, spec.scale, seen, spec.softcap, self._sinks_N
        )

    def _seen(self, q_TND: Tensor, batch: ForwardBatch, chosen: list[Tensor] | None) -> Sequence[Tensor] | None:
        """The mask of visible keys, or None if each token sees all of its window."""
        spec, meta = self.spec, batch.attention
        if spec.whole_pictures and batch.groups is not None:
            return with_pictures(meta, spec.window, batch.groups)
        if spec.chunk is not None and meta.max_kv_len > spec.chunk:
            return in_chunks(meta, spec.chunk, q_TND.device)
        local = q_TND.shape[1]
        first = batch.comms.heads.index * local
        if chosen is not None:
            return of_heads(chosen, spec.num_heads, first, local)
        if spec.alibi is not None:
            return biased(meta, spec.window, spec.alibi, slice(first, first + local), q_TND.device)
        return None


def sharpened(q_TND: Tensor, temperature: Temperature, batch: ForwardBatch) -> Tensor:
    """Queries scaled by their position (temperature tuning), in float32."""
    whole_T = torch.floor((batch.positions_T.float() + temperature.offset) / temperature.length)
    factor_T11 = (1.0 + temperature.strength * torch.log1p(whole_T))[:, None, None]
    return (q_TND * factor_T11).to(q_TND.dtype)


def biased(
    meta: AttentionMeta, window: int | None, alibi: Alibi, heads: slice, device: torch.device
) -> tuple[Tensor, ...]:
    """The bias on the scores of each head of each sequence, float32 [N, t, L]; -inf for masked keys.

    Biases count from the first key, as in releases' own code: a softmax does not tell that from a distance.
    """
    key = ("alibi", alibi, window, heads.start)
    if key not in meta.memo:
        slopes_N11 = torch.tensor(alibi.slopes[heads], device=device)[:, None, None]
        bias_N1L = slopes_N11 * torch.arange(meta.max_kv_len, device=device)
        if alibi.narrow:
            bias_N1L = (slopes_N11.bfloat16() * torch.arange(meta.max_kv_len, device=device)).float()
        meta.memo[key] = tuple(
            (bias_N1L[..., :kv_len] * alibi.scale).masked_fill(
                ~visible(query_len, kv_len, window, device), float("-inf")
            )
            for query_len, kv_len in zip(meta.query_lens, meta.kv_lens, strict=True)
        )
    found: tuple[Tensor, ...] = meta.memo[key]
    return found


def with_pictures(meta: AttentionMeta, window: int | None, groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The keys that each token of each sequence sees, bool [t, L]: those before it and all of its own picture."""
    key = ("pictures", window)
    if key not in meta.memo:
        meta.memo[key] = tuple(
            _with_pictures(query_len, kv_len, window, group_L)
            for query_len, kv_len, group_L in zip(meta.query_lens, meta.kv_lens, groups, strict=True)
        )
    seen: tuple[Tensor, ...] = meta.memo[key]
    return seen


def _with_pictures(query_len: int, kv_len: int, window: int | None, group_L: Tensor) -> Tensor:
    key_L = torch.arange(kv_len, device=group_L.device)
    query_t1, own_t1 = key_L[kv_len - query_len :, None], group_L[kv_len - query_len :, None]
    seen = (key_L <= query_t1) | ((own_t1 == group_L) & (own_t1 >= 0))
    return seen if window is None else seen & (key_L > query_t1 - window)


def in_chunks(meta: AttentionMeta, chunk: int, device: torch.device) -> tuple[Tensor, ...]:
    """The keys that each token of each sequence sees, bool [t, L]: those before it in its own chunk of positions."""
    key = ("chunk", chunk)
    if key not in meta.memo:
        meta.memo[key] = tuple(
            visible(query_len, kv_len, None, device)
            & (
                torch.arange(kv_len - query_len, kv_len, device=device)[:, None] // chunk
                == torch.arange(kv_len, device=device)[None, :] // chunk
            )
            for query_len, kv_len in zip(meta.query_lens, meta.kv_lens, strict=True)
        )
    seen: tuple[Tensor, ...] = meta.memo[key]
    return seen
