"""Detects tensor names that all carry a different prefix than the family expects, and reports it as one fault.

No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product

import msgspec

from firstlight.engine.findings import MOST_TENSORS, Finding, fatal, listing
from firstlight.engine.model.rules import Matcher
from firstlight.engine.weights.accounts.gaps import weight_of
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.names.listed import Group, Listed, Numbered
from firstlight.engine.weights.names.naming import pattern_of

FEWEST_KINDS = 16  # that are worth one finding instead of one each
MOST_KINDS = 1000  # that are looked at: names of one model have fewer
_MOST_PARTS = 3  # of a name that are taken for its beginning
_HEAD = re.compile(r"[^{(]*\.")


class Renamed(msgspec.Struct, frozen=True):
    """`groups` of tensors begin with `dropped` where rules have `added`, and would fill parameters of `params`."""

    dropped: str
    added: str
    groups: dict[str, Group]
    params: frozenset[str]

    def findings(self, missing: Mapping[str, Numbered], tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
        """One finding for the tensors, and one for the parameters that they would fill."""
        names = Listed(groups=self.groups.values())
        lacking = Listed(groups=[of_it for pattern, of_it in missing.items() if pattern in self.params])
        begins = " and ".join(
            said.format(head)
            for said, head in (("begin with '{}'", self.dropped), ("do not begin with '{}'", self.added))
            if head
        )
        wanted = f"names that begin with {self.added}" if self.added else "names without it"
        way = "rename the tensors, or let the rules of the family take such names as well; nothing is guessed"
        if lacking:
            yield fatal(
                "missing-tensor",
                f"{len(lacking):,} parameters of {len(lacking.by_pattern()):,} kinds are not filled: their tensors "
                f"have names that {begins}",
                **listing(lacking),
                expected=wanted,
                found=names[0],
                next=way,
            )
        yield fatal(
            "unconsumed-tensor",
            f"{len(names):,} tensors of {len(self.groups):,} kinds, of which no rule speaks, have names that {begins}: "
            f"{names.shown(2)}, and so on",
            file=tensors[names[0]].file,
            **listing(names),
            expected=wanted,
            found=names[0],
            next=way,
        )


def renamed(groups: Mapping[str, Group], missing: Collection[str], matcher: Matcher) -> Renamed | None:
    """What most of very many kinds that no rule speaks of have in common with names that rules do speak of.

    `missing`: patterns of parameters that lack tensors; only what would fill such is meant.
    """
    if not FEWEST_KINDS < len(groups) <= MOST_KINDS:
        return None
    strange = {pattern: of for pattern in groups if matcher.knows_none_of(of := weight_of(pattern))}
    best: tuple[str, str, list[str]] = "", "", []
    for dropped, added in product(_beginnings(strange.values()), _beginnings(_heads(matcher))):
        fitting = [
            pattern
            for pattern, weight in strange.items()
            if weight.startswith(dropped) and not matcher.knows_none_of(added + weight.removeprefix(dropped))
        ]
        if len(fitting) > len(best[2]):
            best = dropped, added, fitting
    dropped, added, fitting = best
    chosen: dict[str, Group] = {}
    params: set[str] = set()
    for pattern in fitting:
        filled = _filled(groups[pattern], strange[pattern], dropped, added, matcher)
        if not filled.isdisjoint(missing):
            chosen[pattern] = groups[pattern]
            params |= filled
    if len(chosen) <= FEWEST_KINDS or 2 * len(chosen) < len(strange):
        return None
    return Renamed(dropped, added, chosen, frozenset(params))


def _filled(group: Group, weight: str, dropped: str, added: str, matcher: Matcher) -> set[str]:
    """The patterns of the parameters that tensors would fill by other names."""
    kind = added + weight.removeprefix(dropped)
    found = matcher.match_kind(kind, kind.replace("*", "0"), lambda: ())
    if found is not None:
        return set(found[1])
    weights = (added + weight_of(name).removeprefix(dropped) for name in group[:MOST_TENSORS])
    matches = (matcher.match(weight) for weight in weights)
    return {pattern_of(param) for match in matches if match is not None for param in match.params}


def _heads(matcher: Matcher) -> Iterator[str]:
    """What tensors that rules speak of begin with."""
    return (found[0] for item in matcher.rules if (found := _HEAD.match(item.tensor)) is not None)


def _beginnings(names: Iterable[str]) -> list[str]:
    """The first parts of names, one, two and so on, each with its dot; nothing first."""
    found: dict[str, None] = {"": None}
    for name in names:
        parts = name.split(".")[:-1]
        for count in range(1, min(len(parts), _MOST_PARTS) + 1):
            head = ".".join(parts[:count]) + "."
            if "*" not in head:
                found[head] = None
    return list(found)
