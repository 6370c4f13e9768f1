"""Where the tokens of each sequence lie in a flattened batch, and which row of the states is its own.

Legend: B sequences, T tokens of all sequences flattened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """What operators with a state per sequence must know of a batch: on the host for loops, on the device for kernels.

    Sequence b has `lengths[b]` tokens here and row `slots[b]` of every state tensor; when `fresh[b]` its state is still
    that of somebody else, and counts as zero.
    """

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    fresh: tuple[bool, ...]
    start: Tensor  # [B + 1] int32
    slot: Tensor  # [B] int64
    is_fresh: Tensor  # [B] bool
    single: Tensor  # [D] int64: those of one token, as decodes are
    single_row: Tensor  # [D] int64: their tokens

    @staticmethod
    def build(
        lengths: Sequence[int], slots: Sequence[int], fresh: Sequence[bool], device: torch.device | str = "cpu"
    ) -> Sequences:
        """From host lists; every sequence has at least one token, and no two share a slot."""
        assert len(lengths) == len(slots) == len(fresh), (lengths, slots, fresh)
        assert len(set(slots)) == len(slots), f"two sequences in one slot: {slots}"
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        single = [b for b, length in enumerate(lengths) if length == 1]
        return Sequences(
            lengths=tuple(lengths),
            slots=tuple(slots),
            fresh=tuple(fresh),
            start=torch.tensor(starts, dtype=torch.int32, device=device),
            slot=torch.tensor(list(slots), dtype=torch.int64, device=device),
            is_fresh=torch.tensor(list(fresh), dtype=torch.bool, device=device),
            single=torch.tensor(single, dtype=torch.int64, device=device),
            single_row=torch.tensor([starts[b] for b in single], dtype=torch.int64, device=device),
        )

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def spans(self, shortest: int = 1) -> Iterator[tuple[int, int, int, bool]]:
        """(first token, behind the last, slot, fresh) of each sequence of at least `shortest` tokens."""
        first = 0
        for length, slot, fresh in zip(self.lengths, self.slots, self.fresh, strict=True):
            if length >= shortest:
                yield first, first + length, slot, fresh
            first += length

    def single_states(self, state_S: Tensor) -> Tensor:
        """A copy of the states [D, ...] of the sequences of one token, zero where fresh."""
        state_D = state_S[self.slot[self.single]]
        if any(self.fresh):
            state_D[self.is_fresh[self.single]] = 0
        return state_D
