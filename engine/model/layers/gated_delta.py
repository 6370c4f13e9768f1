"""Linear attention by the gated delta rule. See the spec of the same name for the formula.

Legend: T tokens, H hidden, J key heads and N value heads on this rank, K key dim, V value dim, R rows of a projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.recurrent import gated_norm, sequences_of, unit_length


class GatedDelta:
    """x [T, H] -> [T, H]; this rank's heads, summed over ranks. `cache`: the convolution's inputs, the memory."""

    def __init__(self, spec: specs.GatedDelta, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("in")
        self._f_b = weights.linear("f_b") if spec.decay_rank is not None else None
        self._g_b = weights.linear("g_b") if spec.gate_rank is not None else None
        self._o = weights.linear("o")
        self._conv_RW = weights.tensor("conv.weight").squeeze(1)
        self._dt_bias = weights.tensor("dt_bias")
        self._rate_N = weights.tensor("decay").float().flatten().exp()
        self._norm_V = weights.tensor("norm.weight")
        self._num_heads = weights.columns("o") // spec.value_dim
        self._key_heads = self._num_heads * spec.num_key_heads // spec.num_heads

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, tokens, sequences = self.spec, x_TH.shape[0], sequences_of(batch)
        conv_state, memory = cache
        qkv_TR, gate_TNV, beta_TN, f = self._projected(x_TH)
        qkv_TR = batch.ops.causal_conv(qkv_TR, self._conv_RW, None, conv_state, sequences, "silu")
        keys, values = self._key_heads * spec.key_dim, self._num_heads * spec.value_dim
        q_TR, k_TR, v_TR = qkv_TR.split((keys, keys, values), dim=-1)
        q_TJK = unit_length(q_TR.view(tokens, -1, spec.key_dim)) * spec.key_dim**-0.5
        k_TJK = unit_length(k_TR.view(tokens, -1, spec.key_dim))
        v_TNV = v_TR.view(tokens, -1, spec.value_dim)
        out_TNV = batch.ops.linear_attention(q_TJK, k_TJK, v_TNV, self._log_decay(f), beta_TN, memory, sequences)
        out_TNV = gated_norm(out_TNV, gate_TNV, self._norm_V, spec.eps, spec.gate_activation)
        return batch.comms.heads.all_reduce(self._o(out_TNV.reshape(tokens, -1)))

    def _projected(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k and v for the convolution, gate [T, N, V], beta [T, N], what the decay is made of)."""
        spec, tokens = self.spec, x_TH.shape[0]
        keys, values = self._key_heads * spec.key_dim, self._num_heads * spec.value_dim
        all_TR = self._in(x_TH)
        if spec.fused:
            shared = self._num_heads // self._key_heads
            wide, narrow = all_TR.split((2 * keys + 2 * values, 2 * self._num_heads), dim=-1)
            by_head = (spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim)
            *qkv, gate = wide.view(tokens, self._key_heads, -1).split(by_head, dim=-1)
            qkv_TR = torch.cat([part.flatten(1) for part in qkv], dim=-1)
            beta, f = (part.flatten(1) for part in narrow.view(tokens, self._key_heads, -1).chunk(2, dim=-1))
        else:
            decays = self._dt_bias.shape[0] if spec.decay_rank is None else spec.decay_rank
            gates = values if spec.gate_rank is None else spec.gate_rank
            qkv_TR, gate, beta, f = all_TR.split((2 * keys + values, gates, self._num_heads, decays), dim=-1)
        f = f if self._f_b is None else self._f_b(f)
        gate = gate if self._g_b is None else self._g_b(gate)
        beta_TN = torch.sigmoid(beta.float()) * spec.beta_scale
        return qkv_TR, gate.reshape(tokens, -1, spec.value_dim), beta_TN, f

    def _log_decay(self, f: Tensor) -> Tensor:
        """[T, N], or [T, N, K], of the logarithms of what is kept."""
        f = f.float() + self._dt_bias
        rate = self._rate_N
        if self.spec.decay == "channel":
            f, rate = f.view(f.shape[0], -1, self.spec.key_dim), rate.unsqueeze(-1)
        if self.spec.decay_bound is not None:
            return self.spec.decay_bound * torch.sigmoid(rate * f)
        return -rate * F.softplus(f)
