"""Attention by our own C++ over the bfloat16 cache on CPUs, and the write into the cache.

A sequence gives the same bits whatever else is in the batch. Where the CPU has no bfloat16 dot products, a step in
which any sequence has more than one token goes to torch's fused attention (sdpa.py) as a whole.
Legend: T tokens, B sequences, N query heads, K key/value heads, D head dim, V value head dim, P pages, S page size.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import torch
from torch import Tensor

from firstlight.kernels.attention import sdpa
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.native.build import function, has_bf16_dot

Sizes: TypeAlias = ctypes.Array[ctypes.c_int64]


def attention(
    q_TND: Tensor,
    k_cache_PKSD: Tensor,
    v_cache_PKSV: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """See the reference for the contract; queries and caches are bfloat16."""
    if meta.max_query_len > 1 and (q_TND.shape[-1] % 2 or not has_bf16_dot()):
        return sdpa.attention(q_TND, k_cache_PKSD, v_cache_PKSV, meta, scale, window, softcap, sinks_N)
    _check(q_TND, k_cache_PKSD, v_cache_PKSV)
    T, N, _ = q_TND.shape
    if sinks_N is not None:
        sinks_N = sinks_N.float().contiguous()
    out_TNV = torch.empty(T, N, v_cache_PKSV.shape[-1], dtype=torch.bfloat16)
    function("attention", "pppppppppffi")(
        q_TND.data_ptr(), k_cache_PKSD.data_ptr(), v_cache_PKSV.data_ptr(),
        meta.page_table.data_ptr(), meta.query_start.data_ptr(), meta.kv_len.data_ptr(),
        None if sinks_N is None else sinks_N.data_ptr(), out_TNV.data_ptr(),
        _attention_sizes(q_TND, k_cache_PKSD, v_cache_PKSV, meta, window),
        scale, softcap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return out_TNV


def write_cache(k_TKD: Tensor, v_TKV: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta) -> None:
    """See the reference for the contract; keys, values and caches are bfloat16."""
    _check(k_TKD, v_TKV, k_cache_PKSD, v_cache_PKSV)
    function("write_cache", "pppppppi")(
        k_TKD.data_ptr(), v_TKV.data_ptr(), k_cache_PKSD.data_ptr(), v_cache_PKSV.data_ptr(),
        meta.token_page.data_ptr(), meta.token_slot.data_ptr(),
        _write_sizes(k_TKD, v_TKV, k_cache_PKSD, v_cache_PKSV, meta), torch.get_num_threads(),
    )  # fmt: skip


def _attention_sizes(
    q_TND: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta, window: int | None
) -> Sizes:
    """Strides and sizes as native.cpp reads them; the layers of a step share them."""
    key = ("native", window, *_layout(q_TND), *_layout(k_cache_PKSD), *_layout(v_cache_PKSV))
    sizes = meta.memo.get(key)
    if sizes is None:
        (_, N, D), K, V = q_TND.shape, k_cache_PKSD.shape[1], v_cache_PKSV.shape[-1]
        sizes = meta.memo[key] = _sizes(
            *q_TND.stride()[:2], *k_cache_PKSD.stride()[:3], *v_cache_PKSV.stride()[:3],
            meta.page_table.shape[1], meta.page_size, len(meta.query_lens), N, K, D, V, window or 0,
        )  # fmt: skip
    return sizes


def _write_sizes(
    k_TKD: Tensor, v_TKV: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta
) -> Sizes:
    key = ("native write", *_layout(k_TKD), *_layout(v_TKV), k_cache_PKSD.stride(), v_cache_PKSV.stride())
    sizes = meta.memo.get(key)
    if sizes is None:
        sizes = meta.memo[key] = _sizes(
            *k_TKD.shape, v_TKV.shape[-1], *k_TKD.stride()[:2], *v_TKV.stride()[:2],
            *k_cache_PKSD.stride()[:3], *v_cache_PKSV.stride()[:3],
        )  # fmt: skip
    return sizes


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _sizes(*values: int) -> Sizes:
    return (ctypes.c_int64 * len(values))(*values)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype is torch.bfloat16, tensor.dtype
        assert tensor.stride(-1) == 1, tensor.stride()
