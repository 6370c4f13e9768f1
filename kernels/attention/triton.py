"""Attention over the paged cache in Triton: one kernel for prefill, chunks, decode and mixtures of them.

The query heads that share a key head, and the tokens of a sequence, are the rows of one matrix (row = t * G + g), so
decode fills the tensor cores as far as its group allows, and any group size fits. Few long sequences are cut into
splits of keys whose partial results a second kernel joins (flash-decoding).

Legend: B sequences, t tokens of one, N query heads, K key/value heads, G = N / K, D head dim, V value head dim, P
pages, S page size. D is taken as a main part, the largest power of two in it, and a rest (576 = 512 + 64), so that an
odd width costs little padding.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.triton_support import dot, needs_upcast, unit_last_stride

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _write_cache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_ptr,
    slot_ptr,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    k_cache_stride_page,
    k_cache_stride_head,
    k_cache_stride_slot,
    v_cache_stride_page,
    v_cache_stride_head,
    v_cache_stride_slot,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, slot = tl.load(page_ptr + token), tl.load(slot_ptr + token)
    dim = tl.arange(0, BLOCK_D)
    k = tl.load(k_ptr + token * k_stride_token + head * k_stride_head + dim, mask=dim < HEAD_DIM)
    v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + dim, mask=dim < VALUE_DIM)
    k_row = k_cache_ptr + page * k_cache_stride_page + head * k_cache_stride_head + slot * k_cache_stride_slot
    v_row = v_cache_ptr + page * v_cache_stride_page + head * v_cache_stride_head + slot * v_cache_stride_slot
    tl.store(k_row + dim, k.to(k_cache_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
    tl.store(v_row + dim, v.to(v_cache_ptr.dtype.element_ty), mask=dim < VALUE_DIM)


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,  # [T, N, V], or the splits' sums [SPLITS, T, N, V] in float32
    split_max_ptr,  # [SPLITS, T, N]
    split_sum_ptr,
    query_start_ptr,
    kv_len_ptr,
    page_table_ptr,
    page_table_stride,
    num_tokens,
    num_heads,
    group,
    page_size,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_head,
    k_stride_slot,
    v_stride_page,
    v_stride_head,
    v_stride_slot,
    scale,
    window,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0: the main part is all of it
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,  # the values are the main part of the keys: loaded once
):
    block, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    first_token = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - first_token
    kv_len = tl.load(kv_len_ptr + sequence)
    num_rows = query_len * group
    if block * BLOCK_M < num_rows:
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = row < num_rows
        token, head = row // group, kv_head * group + row % group
        position_q = kv_len - query_len + token
        token = (first_token + token).to(tl.int64)
        q_row = q_ptr + token * q_stride_token + head * q_stride_head
        dim = tl.arange(0, BLOCK_MAIN)
        in_main = dim < HEAD_DIM
        q = tl.load(q_row[:, None] + dim[None, :], mask=is_row[:, None] & in_main[None, :], other=0.0)
        if BLOCK_REST:
            rest = BLOCK_MAIN + tl.arange(0, BLOCK_REST)
            in_rest = rest < HEAD_DIM
            q_rest = tl.load(q_row[:, None] + rest[None, :], mask=is_row[:, None] & in_rest[None, :], other=0.0)

        # The keys that any row of this block sees, and this split's share of them.
        end = kv_len - query_len + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // group, query_len - 1) + 1
        start = 0
        if HAS_WINDOW:
            start = tl.maximum(0, kv_len - query_len + block * BLOCK_M // group - window + 1)
        share = tl.cdiv(tl.cdiv(end - start, SPLITS), BLOCK_N) * BLOCK_N
        start += split * share
        end = tl.minimum(end, start + share)

        value_dim = tl.arange(0, BLOCK_V)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for first_key in range(start, end, BLOCK_N):
            position_k = first_key + tl.arange(0, BLOCK_N)
            is_key = position_k < end
            page = tl.load(
                page_table_ptr + sequence * page_table_stride + position_k // page_size, mask=is_key, other=0
            ).to(tl.int64)
            slot = position_k % page_size
            k_row = k_ptr + page * k_stride_page + kv_head * k_stride_head + slot * k_stride_slot
            k = tl.load(k_row[None, :] + dim[:, None], mask=is_key[None, :] & in_main[:, None], other=0.0)
            logits = dot(q, k, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            if BLOCK_REST:
                k_rest = tl.load(k_row[None, :] + rest[:, None], mask=is_key[None, :] & in_rest[:, None], other=0.0)
                logits = dot(q_rest, k_rest, logits, UPCAST)
            logits *= scale
            if HAS_SOFTCAP:  # softcap * tanh(logit / softcap)
                logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
            seen = is_key[None, :] & (position_k[None, :] <= position_q[:, None])
            if HAS_WINDOW:
                seen &= position_q[:, None] - position_k[None, :] < window
            logits = tl.where(seen, logits * LOG2_E, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(logits, axis=1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(logits - safe_max[:, None])
            shrink = tl.exp2(row_max - safe_max)
            row_sum = row_sum * shrink + tl.sum(weights, axis=1)
            row_max = new_max
            if VALUES_ARE_KEYS:
                v = tl.trans(k)
            else:
                v_row = v_ptr + page * v_stride_page + kv_head * v_stride_head + slot * v_stride_slot
                in_value = is_key[:, None] & (value_dim < VALUE_DIM)[None, :]
                v = tl.load(v_row[:, None] + value_dim[None, :], mask=in_value, other=0.0)
            acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], UPCAST)

        place = token * num_heads + head
        is_out = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
        if SPLITS == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)
                row_sum += tl.exp2(sink - safe_max)
            out = acc / tl.where(is_row, row_sum, 1.0)[:, None]
        else:
            place += split.to(tl.int64) * num_tokens * num_heads
            tl.store(split_max_ptr + place, row_max, mask=is_row)
            tl.store(split_sum_ptr + place, row_sum, mask=is_row)
            out = acc
        out_row = out_ptr + place * VALUE_DIM
        tl.store(out_row[:, None] + value_dim[None, :], out.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _join_kernel(
    part_ptr,
    split_max_ptr,
    split_sum_ptr,
    sinks_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = token * num_heads + head
    split = tl.arange(0, SPLITS).to(tl.int64) * num_tokens * num_heads + place
    split_max = tl.load(split_max_ptr + split)
    row_max = tl.max(split_max, axis=0)
    share = tl.exp2(split_max - row_max)  # 0 for a split that saw no key
    row_sum = tl.sum(tl.load(split_sum_ptr + split) * share, axis=0)
    if HAS_SINKS:
        row_sum += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - row_max)
    dim = tl.arange(0, BLOCK_V)
    part = tl.load(part_ptr + split[:, None] * VALUE_DIM + dim[None, :], mask=(dim < VALUE_DIM)[None, :], other=0.0)
    out = tl.sum(part * share[:, None], axis=0) / row_sum
    tl.store(out_ptr + place * VALUE_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)


def write_cache(k_TKD: Tensor, v_TKV: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta) -> None:
    """Write the current tokens' keys and values into their slots (see the reference for the contract)."""
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    value_dim = v_TKV.shape[-1]
    if num_tokens == 0:
        return
    _write_cache_kernel[(num_tokens, num_kv_heads)](
        unit_last_stride(k_TKD),
        unit_last_stride(v_TKV),
        k_cache_PKSD,
        v_cache_PKSV,
        meta.token_page,
        meta.token_slot,
        *unit_last_stride(k_TKD).stride()[:2],
        *unit_last_stride(v_TKV).stride()[:2],
        *k_cache_PKSD.stride()[:3],
        *v_cache_PKSV.stride()[:3],
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(max(head_dim, value_dim)),
        num_warps=1,
    )


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
    """Attend causally over the cache (see the reference for the contract). No value of an unused slot is read."""
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads, value_dim = k_cache_PKSD.shape[1], v_cache_PKSV.shape[-1]
    out_TNV = torch.empty(num_tokens, num_heads, value_dim, dtype=q_TND.dtype, device=q_TND.device)
    if num_tokens == 0:
        return out_TNV
    q_TND = unit_last_stride(q_TND)
    group = num_heads // num_kv_heads
    tiles = tiles_for(head_dim, value_dim, meta.max_query_len * group, q_TND.dtype.itemsize)
    blocks = triton.cdiv(meta.max_query_len * group, tiles.block_m)
    num_sequences = len(meta.kv_lens)
    seen = meta.max_kv_len if window is None else min(meta.max_kv_len, window + meta.max_query_len)
    splits = _num_splits(blocks * num_kv_heads * num_sequences, seen, tiles.block_n, q_TND.device)
    part, split_max, split_sum = out_TNV, out_TNV, out_TNV
    if splits > 1:
        part = torch.empty(splits, num_tokens, num_heads, value_dim, dtype=torch.float32, device=q_TND.device)
        split_max = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=q_TND.device)
        split_sum = torch.empty_like(split_max)
    shared = v_cache_PKSV.data_ptr() == k_cache_PKSD.data_ptr() and v_cache_PKSV.stride() == k_cache_PKSD.stride()
    _attention_kernel[(blocks, num_kv_heads, num_sequences * splits)](
        q_TND,
        k_cache_PKSD,
        v_cache_PKSV,
        out_TNV if sinks_N is None else sinks_N,
        part,
        split_max,
        split_sum,
        meta.query_start,
        meta.kv_len,
        meta.page_table,
        meta.page_table.stride(0),
        num_tokens,
        num_heads,
        group,
        meta.page_size,
        *q_TND.stride()[:2],
        *k_cache_PKSD.stride()[:3],
        *v_cache_PKSV.stride()[:3],
        scale,
        window or 0,
        softcap or 1.0,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_MAIN=tiles.block_main,
        BLOCK_REST=tiles.block_rest,
        BLOCK_V=tiles.block_v,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLITS=splits,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks_N is not None,
        UPCAST=needs_upcast(k_cache_PKSD),
        VALUES_ARE_KEYS=shared and tiles.block_main == tiles.block_v == value_dim,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _join_kernel[(num_tokens, num_heads)](
            part,
            split_max,
            split_sum,
            out_TNV if sinks_N is None else sinks_N,
            out_TNV,
            num_tokens,
            num_heads,
            VALUE_DIM=value_dim,
            BLOCK_V=tiles.block_v,
            SPLITS=splits,
            HAS_SINKS=sinks_N is not None,
        )
    return out_TNV


@dataclass(frozen=True, slots=True)
class Tiles:
    """The block sizes of one launch."""

    block_main: int
    block_rest: int
    block_v: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles_for(head_dim: int, value_dim: int, num_rows: int, itemsize: int) -> Tiles:
    """Choose block sizes that fit Hopper's 227 KiB of shared memory and its registers: a table, not a search."""
    block_main = max(16, triton.next_power_of_2(head_dim + 1) // 2)
    block_rest = 0 if head_dim <= block_main else max(16, triton.next_power_of_2(head_dim - block_main))
    wide = max(block_main + block_rest, triton.next_power_of_2(value_dim)) > 256
    if itemsize == 4:
        most_rows, block_n, num_stages = (16, 16, 1) if wide else (64, 32, 2)
    else:
        most_rows, block_n, num_stages = (64, 32, 2) if wide else (128, 64, 2)
    block_m = min(most_rows, max(16, triton.next_power_of_2(num_rows)))
    return Tiles(
        block_main=block_main,
        block_rest=block_rest,
        block_v=max(16, triton.next_power_of_2(value_dim)),
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if block_m == 128 or wide else 4,
        num_stages=num_stages,
    )


def _num_splits(programs: int, keys: int, block_n: int, device: torch.device) -> int:
    """Cut the keys until there are about two programs per multiprocessor, each with at least four blocks of keys."""
    if device.type == "cuda":
        wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        wanted = 8  # interpreted: enough to take the path
    splits = 1
    while splits < 64 and programs * splits * 2 <= wanted and splits * 2 * 4 * block_n <= keys:
        splits *= 2
    return splits
