"""Reads options of a quantization configuration; a bad value is refused with the name of the option. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.formats.grid import WHOLE


def mapping(value: object) -> Mapping[str, Any]:
    """`value` where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def object_of(key: str, value: object) -> Mapping[str, Any]:
    """`value`, which `key` holds, as an object; an empty one for nothing. Raises `Refused` for anything else."""
    if value is not None and not isinstance(value, Mapping):
        refuse(key, value, "an object, or nothing")
    return mapping(value)


def flag_of(key: str, value: object, default: bool) -> bool:
    """`value`, which `key` holds, as true or false. Raises `Refused` for anything else."""
    if value not in (None, False, True):
        refuse(key, value, "true or false, without quotes")
    return default if value is None else bool(value)


def is_block(value: object) -> TypeGuard[list[int]]:
    """Two positive numbers: rows and columns."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def refuse(key: str, value: object, expected: str) -> NoReturn:
    """Refuses (config-invalid) an impossible value of an option."""
    raise Refused(
        fatal(
            "config-invalid",
            f"quantization: {key} has an impossible value",
            file="config.json",
            expected=expected,
            found=repr(value)[:200],
            next="fetch the release's own config.json again",
        )
    )


class Options:
    """Reads the object under `quantization_config`; `seen` collects the keys that were read."""

    def __init__(self, raw: Mapping[str, Any], seen: set[str] | None = None) -> None:
        self.raw = raw
        self.seen: set[str] = set() if seen is None else seen

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where it is absent or null."""
        self.seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return flag_of(key, self.get(key), default)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names."""
        value = self.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            refuse(key, value, "a list of names")
        return tuple(value)

    def one_of(self, key: str, known: Mapping[str, str], default: str) -> str:
        value = str(self.get(key, default))
        if value not in known:
            self.unsupported(key, value, " or ".join(known))
        return known[value]

    def only(self, key: str, value: object, allowed: tuple[object, ...]) -> None:
        if value not in allowed or (isinstance(value, bool) and not any(item is value for item in allowed)):
            self.unsupported(key, value, " or ".join(map(str, allowed)))

    def group(self, value: object) -> int:
        """A group size; -1, or nothing, is one group for all inputs."""
        if value in (-1, None):
            return WHOLE
        if type(value) is not int or value < 1:
            refuse("group_size", value, "a positive number, or -1 for all inputs")
        return value

    def unsupported(self, key: str, value: object, expected: str) -> NoReturn:
        """Refuses (unsupported-format) a value that means an unsupported layout."""
        method = self.get("quant_method", "?")
        raise Refused(
            fatal(
                "unsupported-format",
                f"quantization {method!r} with {key} = {value!r} is not read here",
                file="config.json",
                expected=f"{key} {expected}",
                found=repr(value)[:200],
                next="write engine/weights/formats/<format>.py, or use another copy of the release; nothing is guessed",
            )
        )
