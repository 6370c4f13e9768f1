"""Files of facts (`data/models`): configurations without weights, and what stands in for keys that they lack.

Where no complete copy of a release's config.json was published, `_filled` names the keys that were lost, `values` as in
a configuration and `why` they are believed. They are read as if the file held them, and always said; a key that the
file does hold is never replaced. Facts of the same release that are kept elsewhere (by `_hf_repo`) are filled in from
the file that is shipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from firstlight.engine.findings import Finding, warning

FILLED = "_filled"


def shipped(name: str) -> dict[str, Any] | None:
    """The facts of `name` that come with the package, as they are written; None without any."""
    file = resources.files("firstlight.data").joinpath("models", f"{name}.json")
    return dict(msgspec.json.decode(file.read_bytes())) if file.is_file() else None


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with what `_filled` holds, or that of the shipped facts of the same release, where it lacks a key."""
    filled = config.get(FILLED)
    if filled is None and isinstance(name := config.get("_name"), str) and "/" not in name:
        own = shipped(name)
        filled = own.get(FILLED) if own is not None and own.get("_hf_repo") == config.get("_hf_repo") else None
    if not isinstance(filled, Mapping) or not isinstance(filled.get("values"), Mapping):
        return dict(config)
    taken = _absent(filled["values"], config)
    if not taken:
        return {key: value for key, value in config.items() if key != FILLED}
    return {**_merged(config, taken), FILLED: {"values": taken, "why": str(filled.get("why", ""))}}


def filled_in(config: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What stands in a completed configuration that no published file states."""
    filled = config.get(FILLED)
    if not isinstance(filled, Mapping):
        return ()
    values = list(_words(filled["values"]))
    return (
        warning(
            "filled-in",
            f"figures rest on keys that the published copy of config.json lacks ({len(values)}): {filled['why']}",
            file="config.json",
            expected="the release's own config.json",
            found=", ".join(values),
            next="plan the release's own config.json where it is at hand",
        ),
    )


def _absent(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        there = config.get(key)
        if isinstance(value, Mapping):
            inner = _absent(value, there if isinstance(there, Mapping) else {})
            found.update({key: inner} if inner else {})
        elif there is None:
            found[key] = value
    return found


def _merged(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for key, value in values.items():
        found[key] = _merged(config.get(key) or {}, value) if isinstance(value, Mapping) else value
    return found


def _words(values: Mapping[str, Any], where: str = "") -> list[str]:
    pairs = ((f"{where}{key}", value) for key, value in values.items())
    return [
        word
        for key, value in pairs
        for word in (_words(value, f"{key}.") if isinstance(value, Mapping) else [f"{key} = {value}"])
    ]
