"""Weight rules read from right to left: from the name of a parameter to the tensors that may store it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from firstlight.engine.model.rules import WeightRule


class Backwards:
    """Rules by the parameters that they fill; those of tensors with any ending (`{*}`) are no names and left out."""

    def __init__(self, rules: Iterable[WeightRule]) -> None:
        self._by_kind: dict[str, list[tuple[re.Pattern[str], WeightRule]]] = {}
        for rule in rules:
            for pattern in rule.params if "{*}" not in rule.tensor else ():
                key = re.sub(r"\{\w+\}|\d+", "#", pattern)
                self._by_kind.setdefault(key, []).append((re.compile(_named(pattern)), rule))

    def rules_of(self, param: str) -> Iterator[tuple[WeightRule, dict[str, str]]]:
        """The rules that fill a parameter, in their order, each with the numbers that stand for its letters."""
        for pattern, rule in self._by_kind.get(re.sub(r"\d+", "#", param), ()):
            if (numbers := pattern.fullmatch(param)) is not None:
                yield rule, numbers.groupdict()

    def tensor_of(self, param: str) -> str | None:
        """What the tensor that stores a parameter is called by the first rule; None where no rule fills it."""
        return next((stored_as(rule, numbers) for rule, numbers in self.rules_of(param)), None)


def stored_as(rule: WeightRule, numbers: Mapping[str, str]) -> str:
    """The name of a rule's tensor for these numbers, the first where it has several."""
    return filled(re.sub(r"\(([^|)]*)\|?[^)]*\)", r"\1", rule.tensor), numbers)


def filled(pattern: str, numbers: Mapping[str, str]) -> str:
    """A pattern with numbers in place of its letters."""
    return re.sub(r"\{(\w+)\}", lambda found: numbers[found[1]], pattern)


def _named(pattern: str) -> str:
    """A parameter pattern as a regular expression: `{i}` is a named run of digits."""
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern))
