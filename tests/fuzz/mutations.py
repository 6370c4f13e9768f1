"""Changes to JSON that keep it JSON: a fuzzer that flips bytes seldom gets past a parser."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, -0.0, "", "F32", "F4",
    "\ud800", "\0", "x" * 300, "bfloat16", "model.safetensors", "..", "full_attention", "yarn",
    [], {}, [0], [0, 8], [[]], {"": None},
)  # fmt: skip


def mutate(text: bytes, seed: int, most_bytes: int) -> bytes | None:
    """The JSON text with one to four places changed, or None when it is no JSON, or has become too long."""
    chance = random.Random(seed)
    try:
        value = json.loads(text)
        for _ in range(chance.randint(1, 4)):
            value = _changed(value, chance)
        found = json.dumps(value, ensure_ascii=chance.random() < 0.7).encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        return None
    return found if len(found) <= most_bytes else None


def _changed(value: Any, chance: random.Random) -> Any:
    """One place, at any depth."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return copy.deepcopy(chance.choice(ODD))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    action = chance.random()
    if action < 0.6:
        value[key] = _changed(value[key], chance)
    elif action < 0.75:
        del value[key]
    elif action < 0.9 and isinstance(value, dict):
        value[chance.choice(["a", "", "\ud800", "model.layers.0.mlp.up_proj.weight", *map(str, keys)])] = copy.deepcopy(
            value[key]
        )
    elif isinstance(value, list):
        value.append(copy.deepcopy(value[key]))
    return value
