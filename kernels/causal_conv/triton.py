"""The short causal convolution in Triton: tiles of tokens and channels first, then the last inputs into the state.

Legend: T tokens of all sequences flattened, C channels, W taps, S slots.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.sequences import Sequences
from firstlight.kernels.triton_support import unit_last_stride


@triton.jit
def _conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # not read unless HAS_BIAS
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    fresh_ptr,
    x_stride_token,
    weight_stride,
    state_stride_slot,
    C: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sequence = tl.program_id(0)
    first, last = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)
    token = first + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, is_channel = token < last, channel < C
    inside = is_token[:, None] & is_channel[None, :]
    own = state_ptr + tl.load(slot_ptr + sequence) * state_stride_slot + channel * (W - 1)
    is_old = tl.load(fresh_ptr + sequence) == 0
    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        seen = token - (W - 1) + tap
        in_x = inside & (seen >= first)[:, None]
        x = tl.load(x_ptr + seen.to(tl.int64)[:, None] * x_stride_token + channel[None, :], mask=in_x, other=0.0)
        before = seen - first + (W - 1)  # its place among the inputs that were kept
        in_state = inside & (seen < first)[:, None] & is_old
        kept = tl.load(own[None, :] + before[:, None], mask=in_state, other=0.0)
        weight = tl.load(weight_ptr + channel * weight_stride + tap, mask=is_channel, other=0.0)
        acc += (x.to(tl.float32) + kept.to(tl.float32)) * weight.to(tl.float32)[None, :]
    if SILU:
        acc = acc * tl.sigmoid(acc)
    place = out_ptr + token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keep_kernel(
    x_ptr,
    state_ptr,
    start_ptr,
    slot_ptr,
    fresh_ptr,
    x_stride_token,
    state_stride_slot,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sequence = tl.program_id(0)
    first, last = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.arange(0, BLOCK_W)
    inside = (channel < C)[:, None] & (place < W - 1)[None, :]
    own = state_ptr + tl.load(slot_ptr + sequence) * state_stride_slot + channel[:, None] * (W - 1)
    seen = last - (W - 1) + place
    in_x = inside & (seen >= first)[None, :]
    x = tl.load(x_ptr + seen.to(tl.int64)[None, :] * x_stride_token + channel[:, None], mask=in_x, other=0.0)
    is_old = tl.load(fresh_ptr + sequence) == 0
    in_state = inside & (seen < first)[None, :] & is_old
    kept = tl.load(own + (place + last - first)[None, :], mask=in_state, other=0.0)
    tl.debug_barrier()  # all of the old state is read before any of the new is written
    tl.store(own + place[None, :], (x.to(tl.float32) + kept.to(tl.float32)).to(state_ptr.dtype.element_ty), mask=inside)


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    state_SCW: Tensor,
    sequences: Sequences,
    activation: str = "silu",
) -> Tensor:
    """Convolve each channel of each sequence with its own filter (see the reference for the contract)."""
    x_TC, weight_CW = unit_last_stride(x_TC), unit_last_stride(weight_CW)
    (tokens, channels), taps = x_TC.shape, weight_CW.shape[1]
    out_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    if tokens == 0:
        return out_TC
    assert state_SCW[0].is_contiguous(), "a state is one piece of memory"
    block_t, block_c = min(triton.next_power_of_2(sequences.max_length), 32), 64
    where = (sequences.start, sequences.slot, sequences.is_fresh.view(torch.uint8))
    count, wide = len(sequences.lengths), triton.cdiv(channels, block_c)
    _conv_kernel[(count, triton.cdiv(sequences.max_length, block_t), wide)](
        x_TC,
        weight_CW,
        weight_CW if bias_C is None else bias_C,
        state_SCW,
        out_TC,
        *where,
        x_TC.stride(0),
        weight_CW.stride(0),
        state_SCW.stride(0),
        C=channels,
        W=taps,
        HAS_BIAS=bias_C is not None,
        SILU=activation == "silu",
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    _keep_kernel[(count, wide)](
        x_TC,
        state_SCW,
        *where,
        x_TC.stride(0),
        state_SCW.stride(0),
        C=channels,
        W=taps,
        BLOCK_W=triton.next_power_of_2(taps - 1),
        BLOCK_C=block_c,
    )
    return out_TC
