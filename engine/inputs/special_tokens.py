"""The special tokens of a checkpoint by name (bos_token, ...), as transformers 5 reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.tokenizer_classes import PIPELINES, Pipeline, effective_class

TOKEN = "a text, or an object whose content is a text"
MOST_DIGITS = 18  # of a token id
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_special_tokens(directory: Path) -> dict[str, str]:
    """The variables a chat template may use, without opening the tokenizer: name to text."""
    config = side_files.read_json_if_present(directory / side_files.CONFIG) or {}
    options = side_files.read_json_if_present(directory / side_files.TOKENIZER_CONFIG) or {}
    file = directory / side_files.TOKENIZER
    is_byte_level = file.is_file() and b'"ByteLevel"' in side_files.read_bytes(file)
    class_name = effective_class(config, options, is_byte_level)
    pipeline = PIPELINES[class_name](options) if class_name in PIPELINES else None
    named, _ = read_special_tokens(directory, options, pipeline)
    return {name: content_of(token) for name, token in named.items()}


def read_special_tokens(
    directory: Path, options: Mapping[str, Any], pipeline: Pipeline | None
) -> tuple[dict[str, Any], list[Any]]:
    """Special tokens by name and those without a name, in transformers' order of precedence.

    A token is a text or a mapping with `content`. Names in `_token` beyond the standard seven (image_token) count.
    """
    listed: dict[str, Any] = dict(options)
    if "added_tokens_decoder" not in options:
        listed.update(side_files.read_json_if_present(directory / "special_tokens_map.json") or {})
    if "additional_special_tokens" in listed and not listed.get("extra_special_tokens"):
        listed["extra_special_tokens"] = listed["additional_special_tokens"]
    named: dict[str, Any] = dict(pipeline.special) if pipeline is not None else {}
    named.update({name: listed[name] for name in NAMED_TOKENS if _is_token(listed.get(name))})
    for name in NAMED_TOKENS:
        if name in listed and listed[name] is None:
            named.pop(name, None)
    named = {name: named[name] for name in NAMED_TOKENS if name in named}
    named.update({k: v for k, v in listed.items() if k.endswith("_token") and k not in NAMED_TOKENS and _is_token(v)})
    extra = listed.get("extra_special_tokens") or []
    if isinstance(extra, Mapping):
        named.update({name: token for name, token in extra.items() if _is_token(token)})
        extra = []
    if not isinstance(extra, list) or not all(map(_is_token, extra)):
        side_files.refuse_value(
            directory / side_files.TOKENIZER_CONFIG, "extra_special_tokens", f"a list of tokens: {TOKEN}", extra
        )
    return named, extra


def tokens_by_id(path: Path, key: str, value: object) -> dict[int, Any]:
    """Validated tokens by id, from `added_tokens_decoder`; raises `Refused` (side-file-invalid)."""
    expected = f"an object of tokens by id, each {TOKEN}"
    if not isinstance(value, Mapping):
        side_files.refuse_value(path, key, expected, value)
    for id_, token in value.items():
        if not id_.isdecimal() or len(id_) > MOST_DIGITS or not _is_token(token):
            side_files.refuse_value(path, key, expected, {id_: token})
    return {int(id_): token for id_, token in value.items()}


def ids_by_text(path: Path) -> dict[str, int]:
    """Token ids by text, from added_tokens.json; empty if there is no such file. Raises `Refused`."""
    found = side_files.read_json_if_present(path) or {}
    for text, id_ in found.items():
        if type(id_) is not int or id_ < 0:
            side_files.refuse_value(path, repr(text), "the id of a token", id_)
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def content_of(token: Any) -> str:
    return str(token if isinstance(token, str) else token["content"])
