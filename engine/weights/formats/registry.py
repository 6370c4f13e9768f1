"""Stored sizes of a model's parameters in the format that its configuration declares, for planning. No torch."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol

from firstlight.engine.model.rules import WeightRule, choices
from firstlight.engine.model.spec import Param
from firstlight.engine.weights.files.header import dtype_bytes
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.grid import Box, Format
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme, is_expression

QUANTIZED_ROLES = frozenset(("attention", "mlp", "expert"))


class StoredFormat(Protocol):
    """What planning asks of a format."""

    def layer_key(self, layer: int) -> Hashable:
        """Equal for layers whose parameters are stored alike."""

    def format_of(self, param: Param) -> Format | None:
        """The format of a parameter; None: stored plain."""

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether every cut of `param` into shards of `shape` takes the same bytes, wherever it starts."""

    def keeps_all(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether every cut of `param` into shards of `shape` needs all of its scales."""

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Bytes of the part of `param` that has `shape` and begins at `start` (None: at its beginning)."""


def stored_format(config: Mapping[str, Any], dtype: str, rules: Iterable[WeightRule] = ()) -> StoredFormat:
    """How a raw `config.json` says the weights are stored; `rules` tell which module a parameter is.

    Raises `Refused` by name for a format that is not known.
    """
    scheme = announced(config)
    return Quantized(dtype, scheme, rules) if scheme.groups else Plain(dtype)


class Quantized:
    """Linear modules as the scheme has them, everything else in `dtype`."""

    def __init__(self, dtype: str, scheme: Scheme, rules: Iterable[WeightRule] = ()) -> None:
        self.dtype = dtype
        self.scheme = _of_first_experts(scheme)
        self._names = TensorNames(rules)
        self._by_layer = _patterns_by_layer(self.scheme)
        self._tells_layers = _has_numbered_expressions(self.scheme)
        self._roles = QUANTIZED_ROLES | ({"head"} if scheme.head else set())
        self._formats: dict[str, Format | None] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The formats by name."""
        return tuple(dict.fromkeys(format_.describe() for format_ in self.scheme.formats))

    def layer_key(self, layer: int) -> Hashable:
        """The patterns of the scheme that name the layer."""
        return self._by_layer.get(str(layer), frozenset()), layer if self._tells_layers else None

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether shards of `shape` begin and end between blocks."""
        found = self.format_of(param)
        return found is None or found.is_even(param.shape, shape)

    def keeps_all(self, param: Param, shape: tuple[int, ...]) -> bool:
        """Whether a list says the group of each input, and inputs are divided."""
        found = self.format_of(param)
        return found is not None and found.keeps_all(param.shape, shape)

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        """Bytes of a part of `param`, scales included; a block that is cut keeps its scale on both sides."""
        found = self.format_of(param)
        if found is None:
            return dtype_bytes(param.dtype or self.dtype, _count(shape))
        first = start or (0,) * len(shape)
        box: Box = tuple((begin, begin + size) for begin, size in zip(first, shape, strict=True))
        return found.nbytes(param.shape, box) if _count(shape) else 0

    def format_of(self, param: Param) -> Format | None:
        """The format of a parameter; None: stored plain."""
        if len(param.shape) != 2 or param.role not in self._roles or not param.name.endswith("weight"):
            return None
        key = param.name if self.scheme.numbered else re.sub(r"\d+", "0", param.name)
        if key not in self._formats:
            names = self._names.of(param.name) or (param.name,)
            found = [self.scheme.of(name.removesuffix(".weight")) for name in names]
            self._formats[key] = None if None in found else found[0]
        return self._formats[key]


class TensorNames:
    """Weight rules read from right to left: the tensors that a parameter may be stored under."""

    def __init__(self, rules: Iterable[WeightRule]) -> None:
        self._patterns: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        for rule in rules:
            for param in rule.params:
                pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(param)))
                for tensor in choices(rule.tensor):
                    self._patterns.setdefault(re.sub(r"\{\w+\}|\d+", "#", param), []).append((pattern, tensor))

    def of(self, param: str) -> tuple[str, ...]:
        """All names, by any rule; those of an extra prediction layer as of the layer behind the last."""
        param = re.sub(r"^mtp\.", "layers.", param)
        found = []
        for pattern, tensor in self._patterns.get(re.sub(r"\d+", "#", param), ()):
            numbers = pattern.fullmatch(param)
            if numbers is not None:
                found.append(re.sub(r"\{(\w+)\}", lambda name, n=numbers: n[name[1]], tensor))  # type: ignore[misc]
        return tuple(found)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _of_first_experts(scheme: Scheme) -> Scheme:
    """Experts are counted by the first: one that stays plain counts for all, so that no plan holds too little."""

    def first(modules: Modules) -> Modules:
        return Modules(re.sub(r"\bexperts\.\d+(?=\.|$)", "experts.0", pattern) for pattern in modules.patterns)

    groups = tuple(Group(g.format, first(g.targets) if g.targets is not None else None) for g in scheme.groups)
    return Scheme(scheme.method, groups, first(scheme.kept), scheme.head)


def _all_patterns(scheme: Scheme) -> tuple[str, ...]:
    targets = [pattern for group in scheme.groups if group.targets is not None for pattern in group.targets.patterns]
    return (*scheme.kept.patterns, *targets)


def _patterns_by_layer(scheme: Scheme) -> dict[str, frozenset[str]]:
    """By number, the names that have it as a part, without it: whatever the part before calls the layers."""
    found: dict[str, set[str]] = {}
    for pattern in _all_patterns(scheme):
        for number in re.finditer(r"(?:^|(?<=\.))[0-9]+(?=\.|$)", pattern):
            found.setdefault(number[0], set()).add(pattern[: number.start()] + "#" + pattern[number.end() :])
    return {number: frozenset(patterns) for number, patterns in found.items()}


def _has_numbered_expressions(scheme: Scheme) -> bool:
    """Whether an expression or a glob speaks of numbers, so that layers cannot be told to be alike."""
    return any(re.search(r"\d", pattern) for pattern in _all_patterns(scheme) if is_expression(pattern))
