"""Rotary position embedding and its scaling methods, as data. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are scaled beyond the trained length; names are those of released configs.

    `proportional`: only the fastest `share` of the frequencies rotate.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions over the first `dim` dims of each head, in halves or, `interleaved`, in neighbouring pairs.

    `sections`: how many of the frequencies turn by a token's frame, row and column (Qwen2-VL, arXiv 2409.12191); one
    after the other or, `sections_interleaved`, in turns, what is left over going by the frame. Of text all three are
    its position.
    """

    theta: float
    dim: int
    interleaved: bool = False
    max_positions: int = 0
    scaling: RopeScaling | None = None
    sections: tuple[int, ...] = ()
    sections_interleaved: bool = False

    def axes(self) -> tuple[int, ...]:
        """Which of frame, row and column (0, 1, 2) each frequency uses."""
        if not self.sections_interleaved:
            return tuple(index % 3 for index, size in enumerate(self.sections) for _ in range(size))
        found = [0] * (self.dim // 2)
        for axis in (1, 2):
            for index in range(axis, min(self.sections[axis] * 3, len(found)), 3):
                found[index] = axis
        return tuple(found)

    def words(self) -> str:
        """`rope 500,000 (llama3 x 8)`."""
        scaling = f" ({self.scaling.kind} x {self.scaling.factor:g})" if self.scaling else ""
        return f"rope {self.theta:,.10g}{scaling}" + (" interleaved" if self.interleaved else "")
