"""Which families know the names of an unknown checkpoint: where a block that it shares with them can be looked up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import Matcher
from firstlight.workbench.alignment import Pattern

LAYER = re.compile(r"^.*?\{i\}\.")
SAID = 3  # families named for a tensor


class Kin(msgspec.Struct, frozen=True):
    """Families that have tensors of the same names below the layer: template -> (parameter, families)."""

    known: Mapping[str, tuple[str, tuple[str, ...]]]
    nearest: tuple[tuple[str, int], ...]

    def words(self, template: str) -> str:
        """`mixer.kv_a.weight in deepseek_v2, deepseek_v3`, or nothing."""
        if template not in self.known:
            return ""
        param, families = self.known[template]
        more = f" and {len(families) - SAID} more" if len(families) > SAID else ""
        return f"{param} in {', '.join(families[:SAID])}{more}"


def kin_of(patterns: Sequence[Pattern]) -> Kin:
    """Asks the rules of every family for the names, whatever the model in front of the layers is called."""
    tails = {pattern.template: LAYER.sub("", pattern.template) for pattern in patterns if pattern.in_layers}
    known: dict[str, tuple[str, list[str]]] = {}
    shared: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for family in {FAMILIES[model_type].name: FAMILIES[model_type] for model_type in FAMILIES}.values():
        matcher, sizes[family.name] = Matcher(family.rules), len(family.rules)
        for template, tail in tails.items():
            param = _param(matcher, tail.replace("{e}", "0"))
            if param is not None:
                shared[family.name] += 1
                known.setdefault(template, (param, []))[1].append(family.name)
    return Kin(
        known={template: (param, tuple(names)) for template, (param, names) in known.items()},
        nearest=tuple(sorted(shared.items(), key=lambda item: (-item[1], sizes[item[0]]))[:SAID]),
    )


def _param(matcher: Matcher, tail: str) -> str | None:
    """What a tensor of layer 0 fills, by its name below the layer; the vision towers' are not asked for."""
    for home in (
        "model.layers.0.",
        "language_model.model.layers.0.",
        "transformer.h.0.",
        "model.language_model.layers.0.",
    ):
        found = matcher.match(home + tail)
        if found is not None and found.params and found.params[0].startswith("layers.0."):
            return found.params[0].removeprefix("layers.0.")
    return None
