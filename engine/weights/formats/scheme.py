"""Which modules are stored in which quantization format, as declared by a configuration. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.refusing import refuse

_REGEX = re.compile(r"[\\\[\](){}^$+?|*]")
_DIGITS = re.compile(r"\d+")
_ENDLESS = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")  # (a+)+ takes for ever where it does not match


class Modules:
    """Patterns of module names: `re:` and a regular expression, a glob, or whole parts of a name.

    `model.layers.0.mlp` names all below it, `lm_head` any module whose name ends so; `mlp.gate` is not `mlp.gate_proj`.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        plain = [p for p in self.patterns if not p.startswith("re:") and not _REGEX.search(p)]
        self._literal = frozenset(plain)
        self._longest = max((p.count(".") + 1 for p in plain), default=0)
        self._regexes = tuple(_compiled(p) for p in dict.fromkeys(self.patterns) if p not in self._literal)
        self.numbered = any(_DIGITS.search(p) for p in self.patterns)

    def __contains__(self, module: str) -> bool:
        if self._literal and self._has_literal(module):
            return True
        return any(regex.match(module) for regex in self._regexes)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def _has_literal(self, module: str) -> bool:
        parts = module.split(".")
        for start in range(len(parts)):
            for stop in range(start + 1, min(len(parts), start + self._longest) + 1):
                if ".".join(parts[start:stop]) in self._literal:
                    return True
        return False


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
        key = module if self.numbered else _DIGITS.sub("0", module)
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def _find(self, module: str) -> Format | None:
        if module in self.kept:
            return None
        named = (group.format for group in self.groups if group.targets is not None and module in group.targets)
        every = (group.format for group in self.groups if group.targets is None)
        return next(named, None) or next(every, None)
