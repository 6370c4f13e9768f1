"""Which modules are stored in which quantization format, as declared by a configuration. No torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING

from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.refusing import refuse
from firstlight.engine.weights.names.patterns import parted

if TYPE_CHECKING:
    from firstlight.engine.weights.names.stock import Kind

_REGEX = re.compile(r"[\\[\](){}^$+?|*]")
_DIGIT = re.compile(r"[0-9]")
_NUMBER = re.compile(r"[0-9]+")
_NO_NUMBERS = re.compile(
    r"[\[\]{}]|\\[0-9]|\(\?(?!:|=|<=\\\.\))"
)  # in an expression: digits may be more than themselves
_ENDLESS = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")  # (a+)+ takes for ever where it does not match


def is_expression(pattern: str) -> bool:
    """Whether a pattern of module names is more than a plain name."""
    return pattern.startswith("re:") or _REGEX.search(pattern) is not None


class Modules:
    """Patterns of module names: `re:` and a regular expression, a glob, or whole parts of a name.

    `model.layers.0.mlp` names all below it, `lm_head` any module whose name ends so; `mlp.gate` is not `mlp.gate_proj`.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        plain = [pattern for pattern in self.patterns if not is_expression(pattern)]
        self._literal = frozenset(plain)
        self._lengths = sorted({p.count(".") + 1 for p in plain})
        self._regexes = tuple(_compiled(p) for p in dict.fromkeys(self.patterns) if p not in self._literal)
        self.numbered = any(_DIGIT.search(p) for p in self.patterns)

    def __contains__(self, module: str) -> bool:
        if self._literal and self._has_literal(module):
            return True
        return any(regex.match(module) for regex in self._regexes)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def _has_literal(self, module: str) -> bool:
        parts = module.split(".")
        for length in self._lengths:
            for start in range(len(parts) - length + 1):
                if ".".join(parts[start : start + length]) in self._literal:
                    return True
        return False

    def of_kind(self, pattern: str, kind: Kind) -> Collection[int]:
        """The places of members of a kind that are among these, called by `pattern` with their numbers.

        A range: all of them. Names are looked at one by one only where a pattern may tell their numbers apart.
        """
        every, examples = range(len(kind.tensors)), list(_examples(pattern, kind.numbers))
        if not any(found.match(example) for found in self._loosely for example in examples):
            named = [example in self for example in examples]
            if all(named) or not any(named):
                return every if all(named) else ()
            return [place for place, name in enumerate(_called(kind, pattern)) if _DIGIT.sub("0", name) in self]
        found = set(self._of_literals(pattern, kind))
        telling = [own for loose, own in self._together if any(loose.match(example) for example in examples)]
        names = _called(kind, pattern) if telling else []
        found.update(place for place, name in enumerate(names) if any(own.match(name) for own in telling))
        return found

    def _of_literals(self, pattern: str, kind: Kind) -> Iterator[int]:
        """Places of members that plain names name: where numbers stand in these, a member has the same."""
        parts = pattern.split(".")
        wanted: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
        for start in range(len(parts)):
            stars = sum(part.endswith("*") for part in parts[:start])
            for own, numbers in self._literals[start > 0].items():
                if parts[start : start + len(own)] == list(own):
                    wanted[stars, stars + sum(part.endswith("*") for part in own)] |= numbers
        rows = kind.rows if wanted else []
        for (first, last), known in wanted.items():
            yield from (place for place, row in enumerate(rows) if row[first:last] in known)

    @cached_property
    def _literals(self) -> tuple[dict[tuple[str, ...], set[tuple[int, ...]]], ...]:
        """The numbers of plain names by the parts of their pattern: of whole names, and of what stands behind a dot."""
        found: tuple[dict[tuple[str, ...], set[tuple[int, ...]]], ...] = ({}, {})
        for literal in self._literal:
            for of_it, (pattern, numbers) in zip(found, (parted(literal), parted(f".{literal}")), strict=True):
                of_it.setdefault(tuple(pattern.removeprefix(".").split(".")), set()).add(numbers)
        return found

    @cached_property
    def _loosely(self) -> list[re.Pattern[str]]:
        """What matches wherever a pattern that spells numbers may match, whatever these are."""
        found = dict.fromkeys(map(_any_numbers, filter(_DIGIT.search, self.patterns)))
        return [re.compile(text) for text in found]

    @cached_property
    def _together(self) -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
        """The expressions, those that differ in numbers only as one, each behind one that matches wherever it may."""
        alike: dict[str, list[str]] = defaultdict(list)
        for own in (regex.pattern for regex in self._regexes):
            alike[own if _NO_NUMBERS.search(own) else _NUMBER.sub("0", own)].append(own)
        both = ((_any_numbers(f"re:{group[0]}"), "|".join(f"(?:{own})" for own in group)) for group in alike.values())
        return [(re.compile(loose), re.compile(own)) for loose, own in both]


def _examples(pattern: str, numbers: Sequence[Sequence[int]]) -> Iterator[str]:
    """A name of a pattern for each choice of how many digits its numbers have, with zeros for these."""
    words = pattern.split("*")
    lengths = [sorted({len(str(number)) for number in column}) for column in numbers]
    for choice in product(*lengths):
        yield words[0] + "".join("0" * size + word for size, word in zip(choice, words[1:], strict=True))


def _any_numbers(pattern: str) -> str:
    """An expression that matches what a pattern matches, and the same with other numbers."""
    own = _compiled(pattern).pattern if is_expression(pattern) else rf"(?:.*\.)?{re.escape(pattern)}(?=\.|$)"
    return ".*" if _NO_NUMBERS.search(own) else _NUMBER.sub("[0-9]+", own)


def _called(kind: Kind, pattern: str) -> list[str]:
    """What members of a kind are called by another pattern with their numbers."""
    names = kind.as_names(pattern)
    form = pattern.replace("%", "%%").replace("*", "%d")
    return [form % parted(name)[1] for name in kind.names] if names is None else names


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern that is no plain name: `re:`, a glob (`*` not behind a dot), or an expression that ends at a dot."""
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:")
    else:
        own = ".*".join(map(re.escape, pattern.split("*"))) if re.search(r"(?<!\.)\*", pattern) else pattern
        text = rf"(?:.*\.)?(?:{own})(?:(?<=\.)|(?=\.|$))"
    try:
        if pattern.startswith("re:") and _ENDLESS.search(text):
            refuse(
                "a pattern of module names", pattern, "an expression without repeats of repeats, which may never end"
            )
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        if pattern.startswith("re:"):
            refuse("a pattern of module names", pattern, f"a regular expression ({error})")
        return re.compile(re.escape(pattern))


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that `targets` names (None: every linear one) are stored in `format`."""

    format: Format
    targets: Modules | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a configuration says: groups in order of precedence, and modules that stay as they are.

    `method` is what the configuration calls it. `head`: whether linear modules include the output head. `unread`:
    options that nothing here reads.
    """

    method: str = ""
    groups: tuple[Group, ...] = ()
    kept: Modules = field(default_factory=lambda: Modules(()))
    head: bool = False
    unread: tuple[str, ...] = ()
    _known: dict[str, Format | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(dict.fromkeys(group.format for group in self.groups))

    @property
    def numbered(self) -> bool:
        """Whether a number in a module's name may change its format."""
        return self.kept.numbered or any(group.targets is not None and group.targets.numbered for group in self.groups)

    def of(self, module: str) -> Format | None:
        """The format of a linear module, by its name in the checkpoint; None: stored plain."""
        if not self.groups:
            return None
        key = module if self.numbered else _DIGIT.sub("0", module)
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def of_kind(self, pattern: str, kind: Kind) -> list[tuple[Format | None, Sequence[int]]]:
        """Members of a kind by the format of the linear module that each belongs to, by its name, which is `pattern`.

        A range: all of them.
        """
        left: Sequence[int] = range(len(kind.tensors))
        found: list[tuple[Format | None, Sequence[int]]] = []
        named = [group for group in self.groups if group.targets is not None]
        for modules, format_ in ((self.kept, None), *((group.targets, group.format) for group in named)):
            own = modules.of_kind(pattern, kind) if modules and left else ()
            if isinstance(own, range):
                return [*found, (format_, left)]
            if own:
                own = set(own)
                found.append((format_, [place for place in left if place in own]))
                left = [place for place in left if place not in own]
        every = next((group.format for group in self.groups if group.targets is None), None)
        return [item for item in (*found, (every, left)) if len(item[1])]

    def _find(self, module: str) -> Format | None:
        if module in self.kept:
            return None
        named = (group.format for group in self.groups if group.targets is not None and module in group.targets)
        every = (group.format for group in self.groups if group.targets is None)
        return next(named, None) or next(every, None)
