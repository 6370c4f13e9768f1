"""The selective scan in Triton: a program carries the states of some channels through one sequence's tokens.

Legend: T tokens of all sequences flattened, D channels, N state dim, S slots.
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
def _scan_kernel(
    x_ptr,
    dt_ptr,
    rate_ptr,
    b_ptr,
    c_ptr,
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    fresh_ptr,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel, entry = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_channel, in_entry = channel < D, entry < N
    inside = in_channel[:, None] & in_entry[None, :]
    cell = channel[:, None] * N + entry[None, :]
    place = state_ptr + tl.load(slot_ptr + sequence) * state_stride_slot + cell
    is_old = tl.load(fresh_ptr + sequence) == 0
    state = tl.load(place, mask=inside & is_old, other=0.0)
    rate = tl.load(rate_ptr + cell, mask=inside, other=0.0).to(tl.float32)
    first, last = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)
    for index in range(first, last):
        token = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + token * x_stride + channel, mask=in_channel, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + token * dt_stride + channel, mask=in_channel, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_stride + entry, mask=in_entry, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + entry, mask=in_entry, other=0.0).to(tl.float32)
        state = tl.exp(-rate * dt[:, None]) * state + (dt * x)[:, None] * b[None, :]
        tl.store(out_ptr + token * D + channel, tl.sum(state * c[None, :], axis=1), mask=in_channel)
    tl.store(place, state, mask=inside)


def selective_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    rate_DN: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    state_SDN: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Decay, write and read the state of each channel (see the reference for the contract)."""
    x_TD, dt_TD, b_TN, c_TN = (unit_last_stride(one) for one in (x_TD, dt_TD, b_TN, c_TN))
    (tokens, channels), state_dim = x_TD.shape, b_TN.shape[1]
    out_TD = torch.empty(tokens, channels, dtype=torch.float32, device=x_TD.device)
    if tokens == 0:
        return out_TD
    assert state_SDN[0].is_contiguous(), "a state is one piece of memory"
    block = 32
    _scan_kernel[(len(sequences.lengths), triton.cdiv(channels, block))](
        x_TD,
        dt_TD,
        rate_DN.contiguous(),
        b_TN,
        c_TN,
        state_SDN,
        out_TD,
        sequences.start,
        sequences.slot,
        sequences.is_fresh.view(torch.uint8),
        x_TD.stride(0),
        dt_TD.stride(0),
        b_TN.stride(0),
        c_TN.stride(0),
        state_SDN.stride(0),
        D=channels,
        N=state_dim,
        BLOCK_D=block,
        BLOCK_N=triton.next_power_of_2(state_dim),
        num_warps=1,
    )
    return out_TD
