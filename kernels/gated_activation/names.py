"""How activations are named: `silu`, or with the numbers that shape them, `situ(4,25)`."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=64)
def split(activation: str) -> tuple[str, tuple[float, ...]]:
    """`situ(4,25)` -> ("situ", (4.0, 25.0)); `silu` -> ("silu", ())."""
    kind, _, numbers = activation.partition("(")
    return kind, tuple(float(number) for number in numbers.rstrip(")").split(",")) if numbers else ()


def named(kind: str, *numbers: float) -> str:
    """The name of an activation with its numbers."""
    return f"{kind}({','.join(repr(float(number)).removesuffix('.0') for number in numbers)})"
