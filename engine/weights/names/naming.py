"""Abbreviates names to patterns, singly and in groups."""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.engine.weights.names.patterns import grouped, numbers, patterns, with_numbers


def pattern_of(name: str) -> str:
    """The name with `*` for its numbers."""
    return patterns([name])[0]


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names grouped by what is left when numbers are taken out."""
    return grouped(names, str)


def pattern_range(pattern: str, names: Iterable[str]) -> str:
    """The pattern with the numbers that occur: `layers.{0..39}.mlp.gate.weight`, `layers.{0..2,7}.norm.weight`."""
    return with_numbers(pattern, numbers(pattern, list(names)))


def shown(names: Iterable[str], most: int = 4) -> str:
    """The first patterns of names with the numbers that occur."""
    return "; ".join(pattern_range(pattern, group) for pattern, group in list(by_pattern(names).items())[:most])
