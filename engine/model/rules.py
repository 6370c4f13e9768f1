"""Weight rules: patterns that map checkpoint tensor names to parameters, as data. No torch.

Pattern language: `{i}` matches a number, written without zeros before it, and carries over to the parameter name;
`{*}` matches anything; `(a|b|)` lists alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import product

import msgspec


class WeightRule(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors named like `tensor` fill `params`.

    With several params the tensor is their concatenation along `split_dim`, in order (their sizes come from the spec),
    or, `interleaved`, takes turns row by row. `stacked`: the tensor's leading dim enumerates the `{e}` of the params.
    `transpose`: the tensor's last two dims are swapped. `unpad`: it may be longer along dim 0 than its parameter, by
    padding that must be zero. No params: the tensor is left out on purpose, for `reason`.
    """

    tensor: str
    params: tuple[str, ...] = ()
    split_dim: int = 0
    interleaved: bool = False
    stacked: bool = False
    transpose: bool = False
    unpad: bool = False
    reason: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A nested model: the family named by `config[key].model_type` (or `default`) brings its rules under `prefix`.

    `flat`: where there is no such key, the nested model's own stand beside the outer's (older releases).
    """

    key: str
    prefix: str
    default: str | None = None
    flat: bool = False


def rule(tensor: str, *params: str, **options: object) -> WeightRule:
    """`WeightRule` with less ink: `rule("model.norm.weight", "norm.weight")`."""
    return msgspec.convert({"tensor": tensor, "params": params, **options}, WeightRule)


def ignored(tensor: str, reason: str) -> WeightRule:
    """A tensor nobody consumes, and why that is right."""
    return WeightRule(tensor=tensor, reason=reason)


def under(prefix: str, rules: Iterable[WeightRule]) -> tuple[WeightRule, ...]:
    """The same rules for tensors below `prefix`."""
    return tuple(msgspec.structs.replace(item, tensor=prefix + item.tensor) for item in rules)


_NUMBER = "(?:0|[1-9][0-9]{0,15})"  # as `engine/weights/names/patterns.py` has it
_DIGITS = re.compile(rf"(?<=\.){_NUMBER}(?=\.|\Z)")
_PARTICULAR = re.compile(r"\.\d+(\.|$)|\{\*\}")
_UNFIXED = re.compile(r"[\d{*]")  # in the last part of a rule's name: it may be spelt in several ways


class Match(msgspec.Struct, frozen=True):
    """The rule a tensor name fell under and the parameter names it leads to (`{e}` left open when stacked)."""

    rule: WeightRule
    params: tuple[str, ...]


Template = tuple[WeightRule, tuple[str, ...]]


class Matcher:
    """Finds the rule of a tensor name; names that differ only in their numbers are matched once.

    Rules whose pattern spells a number or ends in `{*}` speak of particular tensors and are asked first.
    """

    def __init__(self, rules: Iterable[WeightRule]) -> None:
        self.rules = tuple(rules)
        compiled = [(re.compile(_pattern(item.tensor) + r"\Z"), item) for item in self.rules]
        self._particular = [pair for pair in compiled if _PARTICULAR.search(pair[1].tensor)]
        self._general = [pair for pair in compiled if not _PARTICULAR.search(pair[1].tensor)]
        self._by_shape: dict[str, Template | None] = {}

    @cached_property
    def _particular_kinds(self) -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
        """Of each rule of particular tensors: the kinds it may speak of, and the lines of names that it speaks of."""
        return [
            (re.compile(_kind_pattern(item.tensor) + r"\Z"), re.compile(rf"^{_pattern(item.tensor)}$", re.MULTILINE))
            for _, item in self._particular
        ]

    @cached_property
    def _some(self) -> tuple[frozenset[str], re.Pattern[str], re.Pattern[str]]:
        """The kinds that any rule may speak of: asked for where no rule matches, and slow to compile.

        The words that names of rules end with, the kinds of such rules, and those of rules that end otherwise.
        """
        names = [name for item in self.rules for name in choices(item.tensor)]
        ends = {name: name.rpartition(".")[2] for name in names}
        words = frozenset(end for end in ends.values() if not _UNFIXED.search(end))
        parts = ([name for name in names if (ends[name] in words) == is_word] for is_word in (True, False))
        spelt, others = (re.compile((_any_kind(part) if part else "(?!)") + r"\Z") for part in parts)
        return words, spelt, others

    def match(self, name: str) -> Match | None:
        for pattern, item in self._particular:
            if pattern.match(name):
                return Match(item, item.params)
        numbers = _DIGITS.findall(name)
        shape = _DIGITS.sub("#", name)
        if shape not in self._by_shape:
            self._by_shape[shape] = self._find(name)
        found = self._by_shape[shape]
        if found is None:
            return None
        item, templates = found
        return Match(item, tuple(template.format(*numbers, e="{e}") for template in templates))

    def match_kind(self, kind: str, first: str, names: Callable[[], Sequence[str]]) -> Template | None:
        """The rule of all `names` that are `kind` but for `*` in place of numbers; its params have `*` for the same.

        None when there is no one rule for all of them: then each is to be matched on its own. `names`, of which one is
        `first`, are asked for only where a rule of particular tensors may speak of one.
        """
        for shape, lines in self._particular_kinds:
            if shape.match(kind) and lines.search("\n".join(names())):
                return None
        found = self._find(first)
        if found is None:
            return None
        item, templates = found
        numbers = [f"{{{index}}}" for index in range(kind.count("*"))]
        for template in templates:
            if re.findall(r"\{\d+\}", template) != numbers or "*" in template:
                return None
        return item, tuple(re.sub(r"\{\d+\}", "*", template) for template in templates)

    def particular(self, kind: str, names: Callable[[], Sequence[str]]) -> list[int]:
        """The places of those `names`, all of them `kind`, that rules of particular tensors speak of."""
        asked = [lines for shape, lines in self._particular_kinds if shape.match(kind)]
        if not asked:
            return []
        return [place for place, name in enumerate(names()) if any(lines.search(name) for lines in asked)]

    def knows_none_of(self, kind: str) -> bool:
        """Whether no rule can speak of any name that is `kind` but for `*` in place of its numbers."""
        return not self.knows((kind,))[0]

    def knows(self, kinds: Iterable[str]) -> list[bool]:
        """Of each kind whether a rule may speak of names that are the kind but for `*` in place of their numbers."""
        words, spelt, others = self._some
        by_word, otherwise = spelt.match, others.match
        return [
            (kind[kind.rfind(".") + 1 :] in words and by_word(kind) is not None) or otherwise(kind) is not None
            for kind in kinds
        ]

    @cached_property
    def beginnings(self) -> tuple[str, ...]:
        """What tensors' names begin with, up to a number, that rules speak of, or that are parts of such weights."""
        modules = {name.rpartition(".")[0] for item in self.rules for name in choices(item.tensor)}
        return tuple({_UNFIXED.split(module)[0] for module in modules})

    def _find(self, name: str) -> Template | None:
        """The rule and its parameter names with `{0}`, `{1}` ... for the numbers of the tensor name, in order."""
        starts = [number.start() for number in _DIGITS.finditer(name)]
        for pattern, item in self._general:
            found = pattern.match(name)
            if found is not None:
                where = {key: starts.index(found.start(key)) for key in found.groupdict()}
                return item, tuple(_number(param, where) for param in item.params)
        return None


def _number(param: str, where: dict[str, int]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: f"{{{where[m[1]]}}}" if m[1] in where else m[0], param)


def _pattern(tensor: str) -> str:
    """The regular expression of a pattern: alternatives kept, `{i}` a named number, the rest literal."""
    return _expression(tensor, lambda name: f"(?P<{name}>{_NUMBER})", re.escape)


def _kind_pattern(tensor: str) -> str:
    """The same for names with `*` in place of some numbers: what does not match speaks of no name of the kind."""
    return _expression(
        tensor, lambda _: rf"(?:{_NUMBER}|\*)", lambda text: re.sub(r"\d+", r"(?:\g<0>|\\*)", re.escape(text))
    )


def _expression(tensor: str, number: Callable[[str], str], literal: Callable[[str], str]) -> str:
    """A pattern as a regular expression, with what `number` makes of `{i}` and `literal` of plain text."""
    signs = {"{*}": ".*", "(": "(?:", "|": "|", ")": ")"}
    pieces = re.split(r"(\{[\w*]+\}|[(|)])", tensor)
    return "".join(
        signs[piece] if piece in signs else number(piece[1:-1]) if piece.startswith("{") else literal(piece)
        for piece in pieces
    )


def choices(tensor: str) -> list[str]:
    """A pattern with each of its alternatives: `(model.|)norm` is `model.norm` and `norm`."""
    pieces = re.split(r"\(([^)]*)\)", tensor)
    options = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*options)]


def _any_kind(tensors: Iterable[str]) -> str:
    """One expression for the names of kinds that any of these patterns, which list no alternatives, may speak of.

    Parts that several begin with stand in it once, so that names no pattern speaks of are known after a part or two.
    """
    below: dict[str, set[str | None]] = {}
    for tensor in tensors:
        part, dot, rest = tensor.partition(".")
        below.setdefault(part, set()).add(rest if dot else None)
    options = []
    for part, rests in below.items():
        longer = sorted(rest for rest in rests if rest is not None)
        behind = rf"\.{_any_kind(longer)}" if longer else ""
        options.append(_kind_pattern(part) + (f"(?:{behind})?" if behind and None in rests else behind))
    return f"(?:{'|'.join(options)})"
