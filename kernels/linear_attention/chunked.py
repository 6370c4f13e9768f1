"""Linear attention with decay, prompts by chunks: matrix products inside a chunk, the state handed to the next.

Within a chunk the delta rule is a unit triangular system (the WY form of DeltaNet, arXiv 2406.06484). Decays are only
ever combined as differences of their running sums, later minus earlier, so that no exponential exceeds one; the sums
are float64, because heads that forget fast add up to thousands.

Legend: T tokens of all sequences flattened, B sequences, J query/key heads, N value heads, K key dim, V value dim, S
slots, C tokens of a chunk, G decays a head (1 or K).
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.sequences import Sequences

CHUNK = 64  # tokens, where a head has one decay
CHANNEL_CHUNK = 16  # where each channel has its own: C x C x K numbers a head
STEP_BY_STEP = 4  # sequences up to this length, and states of one column, are not worth a chunk


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
    log_decay = log_decay if log_decay.dim() == 3 else log_decay.unsqueeze(-1)
    out_TNV = torch.empty_like(v_TNV)
    if sequences.single.numel():
        rows = sequences.single_row
        q_DJK, k_DJK, v_DNV, g_DNG = (one[rows] for one in (q_TJK, k_TJK, v_TNV, log_decay))
        beta_DN = None if beta_TN is None else beta_TN[rows]
        out_DNV, state_DNKV = _step(q_DJK, k_DJK, v_DNV, g_DNG, beta_DN, sequences.single_states(state_SNKV))
        state_SNKV[sequences.slot[sequences.single]] = state_DNKV
        out_TNV[rows] = out_DNV.to(v_TNV.dtype)
    by_step = v_TNV.shape[-1] == 1
    size = CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK
    for first, last, slot, fresh in sequences.spans(2):
        state_NKV = torch.zeros_like(state_SNKV[slot]) if fresh else state_SNKV[slot]
        width = 1 if by_step or last - first <= STEP_BY_STEP else size
        advance = _chunk if width > 1 else _alone
        for start in range(first, last, width):
            cut = slice(start, min(start + width, last))
            beta = None if beta_TN is None else beta_TN[cut]
            out, state_NKV = advance(q_TJK[cut], k_TJK[cut], v_TNV[cut], log_decay[cut], beta, state_NKV)
            out_TNV[cut] = out.to(v_TNV.dtype)
        state_SNKV[slot] = state_NKV
    return out_TNV


def _step(
    q_BJK: Tensor, k_BJK: Tensor, v_BNV: Tensor, g_BNG: Tensor, beta_BN: Tensor | None, state_BNKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences: (outputs [B, N, V], states)."""
    shared = v_BNV.shape[1] // k_BJK.shape[1]
    q_BNK, k_BNK = (one.float().repeat_interleave(shared, dim=1) for one in (q_BJK, k_BJK))
    state_BNKV = state_BNKV * g_BNG.float().exp().unsqueeze(-1)
    u_BNV = v_BNV.float()
    if beta_BN is not None:
        u_BNV = beta_BN.float().unsqueeze(-1) * (u_BNV - (k_BNK.unsqueeze(2) @ state_BNKV).squeeze(2))
    state_BNKV = state_BNKV.add_(k_BNK.unsqueeze(-1) * u_BNV.unsqueeze(2))
    return (q_BNK.unsqueeze(2) @ state_BNKV).squeeze(2), state_BNKV


def _alone(
    q_1JK: Tensor, k_1JK: Tensor, v_1NV: Tensor, g_1NG: Tensor, beta_1N: Tensor | None, state_NKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of one sequence."""
    out_1NV, state_1NKV = _step(q_1JK, k_1JK, v_1NV, g_1NG, beta_1N, state_NKV.unsqueeze(0))
    return out_1NV, state_1NKV[0]


def _chunk(
    q_CJK: Tensor, k_CJK: Tensor, v_CNV: Tensor, g_CNG: Tensor, beta_CN: Tensor | None, state_NKV: Tensor
) -> tuple[Tensor, Tensor]:
    """C tokens of one sequence: (outputs [C, N, V], the state behind them)."""
    shared = v_CNV.shape[1] // k_CJK.shape[1]
    q_NCK, k_NCK = (one.float().repeat_interleave(shared, dim=1).transpose(0, 1) for one in (q_CJK, k_CJK))
    v_NCV = v_CNV.float().transpose(0, 1)
    total_NCG = g_CNG.transpose(0, 1).double().cumsum(1)  # of the decays up to and with each token
    from_start_NCG, to_end_NCG = total_NCG.exp().float(), (total_NCG[:, -1:] - total_NCG).exp().float()
    upper_CC = torch.ones(v_CNV.shape[0], v_CNV.shape[0], dtype=torch.bool, device=v_CNV.device).triu(1)
    between_NCCG = (total_NCG.unsqueeze(2) - total_NCG.unsqueeze(1)).masked_fill(upper_CC[:, :, None], -torch.inf)
    between_NCCG = between_NCCG.float().exp()  # from the token of the second C to that of the first
    u_NCV = v_NCV
    if beta_CN is not None:
        beta_NC1 = beta_CN.float().T.unsqueeze(-1)
        system_NCC = beta_NC1 * _scores(k_NCK, k_NCK, between_NCCG)
        predicted_NCV = (k_NCK * from_start_NCG) @ state_NKV
        u_NCV = torch.linalg.solve_triangular(
            system_NCC, beta_NC1 * (v_NCV - predicted_NCV), upper=False, unitriangular=True
        )
    out_NCV = (q_NCK * from_start_NCG) @ state_NKV + _scores(q_NCK, k_NCK, between_NCCG) @ u_NCV
    decayed_NKV = state_NKV * from_start_NCG[:, -1].unsqueeze(-1)
    return out_NCV.transpose(0, 1), decayed_NKV + (k_NCK * to_end_NCG).transpose(1, 2) @ u_NCV


def _scores(q_NCK: Tensor, k_NCK: Tensor, between_NCCG: Tensor) -> Tensor:
    """q_i k_j with the decay between them, [N, C, C], zero where j is later than i."""
    if between_NCCG.shape[-1] == 1:
        return (q_NCK @ k_NCK.transpose(1, 2)) * between_NCCG.squeeze(-1)
    return (q_NCK.unsqueeze(2) * k_NCK.unsqueeze(1) * between_NCCG).sum(-1)
