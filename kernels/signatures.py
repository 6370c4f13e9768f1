"""What each operator is called with: the one place that an engine author reads, and that every implementation matches.

The mathematics of each is in its reference: `kernels/<folder>/reference.py`. Legend: T tokens of all sequences
flattened, B sequences, N query heads, K key/value heads, D head dim, V value head dim or vocabulary, R rotated dims,
H hidden, F intermediate or output width, E experts, k chosen experts, M rows sorted by expert, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.sequences import Sequences


class RmsNorm(Protocol):
    """Normalise the last dim."""

    def __call__(self, x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor: ...


class AddRmsNorm(Protocol):
    """Add to the residual, normalise the sum: (normed, summed)."""

    def __call__(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]: ...


class Rotary(Protocol):
    """Rotate queries and keys by their positions."""

    def __call__(
        self, q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]: ...


class GatedActivation(Protocol):
    """activation(gate) * up."""

    def __call__(self, gate_up_T2F: Tensor, activation: str = "silu") -> Tensor: ...


class WriteCache(Protocol):
    """Write the current tokens' keys and values into the cache, in place."""

    def __call__(
        self, k_TKD: Tensor, v_TKV: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta
    ) -> None: ...


class Attention(Protocol):
    """Attend causally over the cache."""

    def __call__(
        self,
        q_TND: Tensor,
        k_cache_PKSD: Tensor,
        v_cache_PKSV: Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


class SelectiveAttention(Protocol):
    """Attend to the cached keys that are selected for each token."""

    def __call__(
        self,
        q_TND: Tensor,
        k_cache_PKSD: Tensor,
        v_cache_PKSV: Tensor,
        meta: AttentionMeta,
        scale: float,
        seen: Sequence[Tensor],
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


class CausalConv(Protocol):
    """Convolve each channel with its own filter; the last inputs of each sequence are its state."""

    def __call__(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        state_SCW: Tensor,
        sequences: Sequences,
        activation: str = "silu",
    ) -> Tensor: ...


class LinearAttention(Protocol):
    """Decay, write and read a matrix per head, token after token."""

    def __call__(
        self,
        q_TJK: Tensor,
        k_TJK: Tensor,
        v_TNV: Tensor,
        log_decay: Tensor,
        beta_TN: Tensor | None,
        state_SNKV: Tensor,
        sequences: Sequences,
    ) -> Tensor: ...


class SelectiveScan(Protocol):
    """Decay, write and read a row of numbers per channel, token after token."""

    def __call__(
        self,
        x_TD: Tensor,
        dt_TD: Tensor,
        rate_DN: Tensor,
        b_TN: Tensor,
        c_TN: Tensor,
        state_SDN: Tensor,
        sequences: Sequences,
    ) -> Tensor: ...


class RouterTopk(Protocol):
    """Choose experts: (weights, ids)."""

    def __call__(
        self,
        logits_TE: Tensor,
        correction_bias_E: Tensor | None,
        top_k: int,
        scoring: str = "softmax",
        normalize: bool = True,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_score: str = "top2_sum",
        scale: float = 1.0,
        score_chosen: bool = False,
        eps: float = 1e-20,
        floor: float = 0.0,
        chosen_Tk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class GroupedMatmul(Protocol):
    """Multiply each expert's rows by its weight."""

    def __call__(self, x_MH: Tensor, weight_EFH: Tensor, group_start_E1: Tensor) -> Tensor: ...


class Moe(Protocol):
    """The expert layer, for the experts held here."""

    def __call__(
        self,
        x_TH: Tensor,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_E2FH: Tensor,
        down_EHF: Tensor,
        rules: ExpertRules,
    ) -> Tensor: ...


class LinearPacked(Protocol):
    """Multiply by a weight that stays packed, as codes and scales."""

    def __call__(self, x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor: ...


class MoePacked(Protocol):
    """The expert layer over weights that stay packed."""

    def __call__(
        self,
        x_TH: Tensor,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_E2FH: PackedMatrix,
        down_EHF: PackedMatrix,
        rules: ExpertRules,
    ) -> Tensor: ...


class Sample(Protocol):
    """Draw one token per row."""

    def __call__(
        self, logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, uniform_B: Tensor
    ) -> Tensor: ...


class PreparedLinear(Protocol):
    """A weight in the layout that its implementation wants, ready to multiply."""

    def __call__(self, x_TH: Tensor) -> Tensor: ...


class PrepareLinear(Protocol):
    """Take a weight [F, H] and a bias [F] and give the callable that multiplies; `row_counts` are the T to expect."""

    def __call__(
        self, weight_FH: Tensor, bias_F: Tensor | None = None, row_counts: Sequence[int] = (1,)
    ) -> PreparedLinear: ...
