"""Reference of linear attention with decay: the recurrent form, token by token, the truth others are compared with.

Legend: T tokens of all sequences flattened, J query/key heads, N value heads, K key dim, V value dim, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.sequences import Sequences


def linear_attention(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_TNV: Tensor,
    log_decay: Tensor,
    beta_TN: Tensor | None,
    state_SNKV: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Decay the state, write the token into it, read it: S <- exp(g) S; S <- S + k u^T; o = S^T q.

    u = v (plain linear attention, state space duality: Mamba2, arXiv 2405.21060), or with `beta` the delta rule u =
    beta (v - S^T k) on the decayed state (Gated DeltaNet, arXiv 2412.06464; Kimi Delta Attention, arXiv 2510.26692).
    `q_TJK`, `k_TJK` [T, J, K], each serving N / J consecutive value heads; `v_TNV` [T, N, V]. `log_decay` <= 0 is one a
    head, [T, N], or one a key channel, [T, N, K]. `state_SNKV` [S, N, K, V] float32 is moved on in place. Gives
    [T, N, V] in the dtype of `v_TNV`; everything inside is float32.
    """
    out_TNV = torch.empty_like(v_TNV)
    shared = v_TNV.shape[1] // k_TJK.shape[1]
    for first, last, slot, fresh in sequences.spans():
        state_NKV = torch.zeros_like(state_SNKV[slot]) if fresh else state_SNKV[slot].clone()
        for t in range(first, last):
            q_NK, k_NK = (one[t].float().repeat_interleave(shared, dim=0) for one in (q_TJK, k_TJK))
            decay = log_decay[t].float().exp()
            state_NKV = state_NKV * decay.view(decay.shape[0], -1, 1)
            u_NV = v_TNV[t].float()
            if beta_TN is not None:
                u_NV = beta_TN[t].float()[:, None] * (u_NV - (state_NKV * k_NK[:, :, None]).sum(1))
            state_NKV = state_NKV + k_NK[:, :, None] * u_NV[:, None]
            out_TNV[t] = (state_NKV * q_NK[:, :, None]).sum(1).to(v_TNV.dtype)
        state_SNKV[slot] = state_NKV
    return out_TNV
