"""Linear attention with decay in Triton: a program carries a strip of one head's state through one sequence's tokens.

Made for steps of few tokens, which read and write the state once; prompts go by chunks (see chunked.py).

Legend: T tokens of all sequences flattened, J query/key heads, N value heads, K key dim, V value dim, S slots.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.linear_attention import chunked
from firstlight.kernels.sequences import Sequences
from firstlight.kernels.triton_support import unit_last_stride

LONGEST = 16  # tokens of a sequence up to which the state is carried token by token


@triton.jit
def _recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,  # not read unless HAS_BETA
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    fresh_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    decay_stride_token,
    decay_stride_head,
    beta_stride_token,
    state_stride_slot,
    N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_row, in_column = row < K, column < V
    inside = in_row[:, None] & in_column[None, :]
    slot = tl.load(slot_ptr + sequence)
    place = state_ptr + slot * state_stride_slot + head * K * V + row[:, None] * V + column[None, :]
    is_old = tl.load(fresh_ptr + sequence) == 0
    state = tl.load(place, mask=inside & is_old, other=0.0)
    first, last = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)
    for index in range(first, last):
        token = tl.cast(index, tl.int64)
        shared = head // SHARED
        q = tl.load(q_ptr + token * q_stride_token + shared * q_stride_head + row, mask=in_row, other=0.0)
        k = tl.load(k_ptr + token * k_stride_token + shared * k_stride_head + row, mask=in_row, other=0.0)
        v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + column, mask=in_column, other=0.0)
        q, k, u = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        decay = decay_ptr + token * decay_stride_token + head * decay_stride_head
        if BY_CHANNEL:
            state = state * tl.exp(tl.load(decay + row, mask=in_row, other=0.0).to(tl.float32))[:, None]
        else:
            state = state * tl.exp(tl.load(decay).to(tl.float32))
        if HAS_BETA:
            beta = tl.load(beta_ptr + token * beta_stride_token + head).to(tl.float32)
            u = beta * (u - tl.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * u[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (token * N + head) * V + column, out.to(out_ptr.dtype.element_ty), mask=in_column)
    tl.store(place, state, mask=inside)


def linear_attention(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_TNV: Tensor,
    log_decay: Tensor,
    beta_TN: Tensor | None,
    state_SNKV: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Decay the state, write the token into it, read it (see the reference for the contract)."""
    if sequences.max_length > LONGEST:
        return chunked.linear_attention(q_TJK, k_TJK, v_TNV, log_decay, beta_TN, state_SNKV, sequences)
    q_TJK, k_TJK, v_TNV = (unit_last_stride(one) for one in (q_TJK, k_TJK, v_TNV))
    by_channel = log_decay.dim() == 3
    log_decay = unit_last_stride(log_decay) if by_channel else log_decay
    beta_TN = None if beta_TN is None else unit_last_stride(beta_TN)
    (tokens, heads, value_dim), key_dim = v_TNV.shape, k_TJK.shape[-1]
    out_TNV = torch.empty(tokens, heads, value_dim, dtype=v_TNV.dtype, device=v_TNV.device)
    if tokens == 0:
        return out_TNV
    assert state_SNKV[0].is_contiguous(), "a state is one piece of memory"
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(1, 4096 // block_k))
    _recurrent_kernel[(len(sequences.lengths), heads, triton.cdiv(value_dim, block_v))](
        q_TJK,
        k_TJK,
        v_TNV,
        log_decay,
        log_decay if beta_TN is None else beta_TN,
        state_SNKV,
        out_TNV,
        sequences.start,
        sequences.slot,
        sequences.is_fresh.view(torch.uint8),
        q_TJK.stride(0),
        q_TJK.stride(1),
        k_TJK.stride(0),
        k_TJK.stride(1),
        v_TNV.stride(0),
        v_TNV.stride(1),
        log_decay.stride(0),
        log_decay.stride(1),
        0 if beta_TN is None else beta_TN.stride(0),
        state_SNKV.stride(0),
        N=heads,
        K=key_dim,
        V=value_dim,
        SHARED=heads // k_TJK.shape[1],
        HAS_BETA=beta_TN is not None,
        BY_CHANNEL=by_channel,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )
    return out_TNV
