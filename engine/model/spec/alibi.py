"""Linear biases on attention scores in place of positions (ALiBi, arXiv 2108.12409), as data. No torch."""

from __future__ import annotations

import math

import msgspec


class Alibi(msgspec.Struct, frozen=True, kw_only=True):
    """A query's score for a key gains slope x the key's position, one slope a head; `scale` multiplies all of them.

    `narrow`: slopes and what they give are rounded to bfloat16 on the way, as Falcon's reference does.
    """

    slopes: tuple[float, ...]
    scale: float = 1.0
    narrow: bool = False


def slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric row from 2^(-8/n) on; of heads that are no power of two, the rest from the row of twice as many."""
    whole = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (num_heads - whole), 2)]
    return tuple(first + between)
