"""Reads the small files beside the weights with a size limit; missing or broken ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.files.json_text import decode, why_no_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_CONFIG = "processor_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"

SIDE_FILE_LIMIT_BYTES = 256 << 20
SHOWN_CHARACTERS = 200  # of a value that is refused


def fetch_again(path: Path) -> str:
    """The next action where a side file is broken."""
    return f"fetch {path.name} from the model's release again"


def read_bytes(path: Path) -> bytes:
    """The bytes of a side file, at most `SIDE_FILE_LIMIT_BYTES`; raises `Refused` (missing- or invalid-side-file)."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would wait for a writer for ever
            raise Refused(
                fatal("side-file-invalid", f"{path.name} is no regular file", file=str(path), next=fetch_again(path))
            )
        if size > SIDE_FILE_LIMIT_BYTES:
            raise Refused(
                fatal(
                    "side-file-invalid",
                    f"{path.name} is too large for such a file",
                    file=str(path),
                    expected=f"at most {SIDE_FILE_LIMIT_BYTES} bytes",
                    found=f"{size} bytes",
                    next=fetch_again(path),
                )
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise Refused(missing(path)) from None
    except OSError as error:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{path.name} cannot be read: {error.strerror}",
                file=str(path),
                next="let this user read it",
            )
        ) from error


def read_text(path: Path) -> str:
    """The UTF-8 text of a side file; raises `Refused`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{path.name} is not UTF-8: {error.reason} at byte {error.start}",
                file=str(path),
                next=fetch_again(path),
            )
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a side file; raises `Refused` when it is absent, not JSON, or not an object."""
    text = read_bytes(path)
    try:
        value = decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        nested = ("is not JSON: it is nested too deeply", "a JSON object", repr(text[:40]))
        what, expected, found = nested if isinstance(error, RecursionError) else why_no_json(text, error)
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{path.name} {what}",
                file=str(path),
                expected=expected,
                found=found,
                next=fetch_again(path),
            )
        ) from None
    if not isinstance(value, dict):
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{path.name} does not hold a JSON object",
                file=str(path),
                expected="an object",
                found=type(value).__name__,
                next=fetch_again(path),
            )
        )
    return value


def read_json_if_present(path: Path) -> dict[str, Any] | None:
    """The JSON object in a side file, or None where there is no such file."""
    return read_json(path) if path.is_file() else None


def refuse_value(path: Path, key: str, expected: str, value: object) -> NoReturn:
    """Refuses (side-file-invalid) the value of a key in a side file."""
    raise Refused(
        fatal(
            "side-file-invalid",
            f"{key} of {path.name} cannot be used",
            file=str(path),
            expected=expected,
            found=repr(value)[:SHOWN_CHARACTERS],
            next=f"correct {key}, or {fetch_again(path)}",
        )
    )


def missing(path: Path, purpose: str = "", next: str | None = None) -> Any:
    """The finding for a side file that is not there."""
    return fatal(
        "missing-side-file",
        f"{path.name} is not there" + (f": {purpose}" if purpose else ""),
        file=str(path),
        expected=path.name,
        found="no such file",
        next=next or f"fetch {path.name} from the model's release into {path.parent}",
    )


def nested(config: Mapping[str, Any], *keys: str) -> Any:
    """The value at a path of keys, or None where a step of the path is absent."""
    value: Any = config
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
