"""The index of a sharded checkpoint, which says which file holds which tensor: read with bounds, held against headers.

Headers are the truth; the index only decides which files belong to the release. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter, eq
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.json_text import colons, decode, keys_twice, why_no_json

if TYPE_CHECKING:
    from firstlight.engine.weights.weight_map import WeightMap

INDEX = "model.safetensors.index.json"
CONFIG_LIMIT_BYTES = 64 << 20
INDEX_LIMIT_BYTES = 256 << 20  # 497,220 tensors take 60 MB
LARGE_BYTES = 4 << 20  # from which on columns are worth the trouble


class Index(msgspec.Struct, frozen=True):
    """Tensor name -> file, the sum of bytes that the index states, and what is wrong with the index by itself."""

    weight_map: dict[str, str] | WeightMap
    stated_bytes: int | None
    findings: tuple[Finding, ...]


def read_object(directory: Path, name: str, limit_bytes: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A JSON object of the directory, and the keys that occur twice in it with different values.

    Raises `Refused` when the file is absent, unreadable, larger than `limit_bytes` or no JSON object.
    """
    return _object(name, _text(directory, name, limit_bytes))


def _text(directory: Path, name: str, limit_bytes: int) -> bytes:
    """The bytes of a file of the directory. Raises `Refused`."""
    path = directory / name
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would wait for a writer for ever
            kind = "a directory" if path.is_dir() else "no regular file"
            raise Refused(_bad(name, f"cannot be read: it is {kind}", "a readable file", kind))
        if size > limit_bytes:
            raise Refused(_bad(name, f"is {size:,} bytes", f"at most {limit_bytes:,} bytes", f"{size:,} bytes"))
        return path.read_bytes()
    except FileNotFoundError as error:
        raise Refused(_absent(directory, name)) from error
    except OSError as error:
        raise Refused(
            _bad(name, f"cannot be read: {error.strerror}", "a readable file", str(error.strerror))
        ) from error


def _object(name: str, text: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The JSON object that a text is, and its keys with two values. Raises `Refused`."""
    try:
        value = decode(text)
        twice = keys_twice(text, value)
    except (msgspec.DecodeError, ValueError) as error:
        raise Refused(_bad(name, *why_no_json(text, error))) from error
    except RecursionError as error:
        raise Refused(_bad(name, "is nested too deeply", "a JSON object", repr(text[:40]))) from error
    if not isinstance(value, dict):
        raise Refused(_bad(name, "is not a JSON object", "a JSON object", type(value).__name__))
    return value, twice


def _absent(directory: Path, name: str) -> Finding:
    there = sorted(entry.name for entry in directory.iterdir())
    found, way = ", ".join(there[:8]) or "an empty directory", f"fetch {name} of the release"
    if (directory / name).is_symlink():
        found = f"a link to {(directory / name).readlink()}, which is not there"
        way = f"fetch {name} itself, or copy the link's target along"
    elif alike := next((entry for entry in there if entry.lower() == name.lower()), None):
        found, way = f"{alike}, spelt otherwise", f"rename {alike} to {name}"
    elif revisions := sorted(path.parent for path in directory.glob(f"snapshots/*/{name}")):
        way = f"this is a model's folder in a cache of Hugging Face: name the revision, {revisions[0]}"
    return fatal("missing-side-file", f"{directory} has no {name}", file=name, expected=name, found=found, next=way)


def _bad(name: str, problem: str, expected: str, found: str) -> Finding:
    return fatal(
        "side-file-invalid", f"{name} {problem}", file=name, expected=expected, found=found, next=f"fetch {name} again"
    )


def read_index(directory: Path) -> Index | None:
    """The index of a directory, or None without one. Raises `Refused` when it cannot be used at all."""
    if not (directory / INDEX).exists() and not (directory / INDEX).is_symlink():
        return None
    text = _text(directory, INDEX, INDEX_LIMIT_BYTES)
    return (_large(text) if len(text) >= LARGE_BYTES else None) or _sound(text) or _closely(*_object(INDEX, text))


def _large(text: bytes) -> Index | None:
    """The index of very many tensors, as `_sound` has it, in a fraction of the time; else None."""
    from firstlight.engine.weights.weight_map import read_weight_map

    found = read_weight_map(text)
    if found is None:
        return None
    weight_map, rest = found
    try:
        others = _decode_plain(rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if others.weight_map or not _is_once(others, rest):
        return None
    _refuse_paths(set(weight_map.files))
    return Index(weight_map, _stated(others.metadata), ())


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """An index as every writer has it."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


_decode_plain = msgspec.json.Decoder(_Plain).decode


def _sound(text: bytes) -> Index | None:
    """The index when nothing about it is unusual, in the time that the parser takes; else None."""
    try:
        found = _decode_plain(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not found.weight_map:
        return None
    if not _is_once(found, text):
        return None
    _refuse_paths(set(found.weight_map.values()))
    return Index(found.weight_map, _stated(found.metadata), ())


def _is_once(found: _Plain, text: bytes) -> bool:
    """Whether surely no key occurs twice."""
    keys = len(found.weight_map) + colons(found.metadata) + text.count(b'"metadata":') + 1
    return b"\\" not in text and text.count(b":") == keys


def _closely(raw: dict[str, Any], twice: tuple[str, ...]) -> Index:
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise Refused(
            fatal(
                "stale-index",
                f"{INDEX} has no usable weight_map",
                file=INDEX,
                expected="weight_map: {tensor: file}",
                found=_unusable(weight_map),
                next="fetch the index again, or delete it: headers are enough",
            )
        )
    _refuse_paths(set(weight_map.values()))
    return Index(weight_map, _stated(raw.get("metadata")), tuple(_listed_twice(twice)))


def _unusable(weight_map: object) -> str:
    """What is in the place of a map: the first entry that is none, where there are others."""
    if isinstance(weight_map, dict):
        wrong = next(((name, file) for name, file in weight_map.items() if not isinstance(file, str)), None)
        return "an empty weight_map" if wrong is None else f"{wrong[0][:60]}: {json.dumps(wrong[1])[:60]}"
    return "no weight_map" if weight_map is None else f"weight_map: {json.dumps(weight_map)[:60]}"


def _stated(metadata: object) -> int | None:
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not math.isfinite(stated):
        return None
    return int(stated)


def _listed_twice(twice: tuple[str, ...]) -> Iterator[Finding]:
    if twice:
        yield fatal(
            "stale-index",
            f"{INDEX} lists {len(twice):,} keys twice with different values",
            file=INDEX,
            tensors=twice,
            expected="every tensor in one file",
            found="two files for one tensor",
            next="fetch the index again, or delete it: headers are enough",
        )


def _refuse_paths(files: set[str]) -> None:
    """A shard is a plain file of the directory; what leaves it is unsafe, a folder below it is not read."""
    for file in sorted(files):
        parts = PurePosixPath(file.replace("\\", "/")).parts
        if len(parts) == 1 and parts[0] not in ("..", "/") and file == parts[0]:
            continue
        leaves = not parts or ".." in parts or parts[0] == "/" or ":" in parts[0]
        where = "outside the directory" if leaves else "into a folder of the directory"
        raise Refused(
            fatal(
                "unsafe-file",
                f"{INDEX} points {where}: {file!r}",
                file=INDEX,
                expected="plain file names",
                found=file,
                next="do not use this checkpoint before you know where it comes from"
                if leaves
                else "put shards and index into one directory, with plain names in the index",
            )
        )


def files_of(weight_map: dict[str, str] | WeightMap) -> set[str]:
    """The files that an index names."""
    return set(weight_map.values() if isinstance(weight_map, dict) else weight_map.files)


def names_in(weight_map: dict[str, str] | WeightMap, files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tensors that an index places in each of these files, sorted."""
    if not isinstance(weight_map, dict):
        return {file: tuple(sorted(weight_map.names_in(file))) for file in files}
    found: dict[str, list[str]] = {file: [] for file in files}
    for name, file in weight_map.items():
        if file in found:
            found[file].append(name)
    return {file: tuple(sorted(names)) for file, names in found.items()}


_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def held(tensors: Iterable[str]) -> str:
    """In words what a file holds: `14 tensors of layers 3 to 5`, `15 tensors: 14 of layer 3, 1 of no layer`."""
    found = [_LAYER.search(name) for name in tensors]
    layers = [int(match[1]) for match in found if match is not None]
    count = f"{len(found):,} tensor{'' if len(found) == 1 else 's'}"
    if not layers:
        return count
    low, high, apart = min(layers), max(layers), len(found) - len(layers)
    which = f"layer {low}" if low == high else f"layers {low} to {high}"
    return f"{count}: {len(layers):,} of {which}, {apart:,} of no layer" if apart else f"{count} of {which}"


def against_headers(
    index: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    files: Iterable[str],
    broken: Iterable[str],
    invalid: Container[str] = (),
) -> Iterator[Finding]:
    """What the index says of the files that were read, held against their headers.

    `broken` files have none; `invalid` are tensors that are in a header, whose entries were found wrong already.
    """
    if len(index) == len(tensors) and all(map(eq, map(index.get, tensors), map(attrgetter("file"), tensors.values()))):
        return
    unlisted = tuple(name for name in tensors if name not in index)
    if unlisted:
        yield warning(
            "unlisted-tensor",
            f"{len(unlisted):,} {'tensor is' if len(unlisted) == 1 else 'tensors are'} present in shards but unlisted "
            "in the index; headers are the truth",
            file=INDEX,
            tensors=unlisted,
            expected="every tensor listed",
            found=f"present in shard, unlisted: {', '.join(sorted({tensors[name].file for name in unlisted})[:4])}",
            next="rebuild the index; the tensors are used as found",
        )
    readable = set(files) - set(broken)
    absent: dict[str, list[str]] = defaultdict(list)
    for name, file in index.items():
        if file in readable and name not in tensors and name not in invalid:
            absent[file].append(name)
    for file, names in absent.items():
        yield fatal(
            "stale-index",
            f"the index places {held(names)} in {file} that its header does not have",
            file=file,
            tensors=tuple(names),
            expected=f"{len(names):,} tensor{'' if len(names) == 1 else 's'} in {file}",
            found="absent",
            next="fetch index and shard again from the same revision",
        )
    moved = tuple(name for name, file in index.items() if name in tensors and tensors[name].file != file)
    if moved:
        yield warning(
            "stale-index",
            f"{len(moved):,} tensors are in other shards than the index says; headers are the truth",
            file=INDEX,
            tensors=moved,
            expected=f"{moved[0]} in {index[moved[0]]}",
            found=f"in {tensors[moved[0]].file}",
            next="rebuild the index; the tensors are used as found",
        )


def against_payload(index: Index, payload_bytes: int) -> Iterator[Finding]:
    """The index's own sum of bytes beside that of the headers; many releases count otherwise, so it is a note."""
    stated = index.stated_bytes
    if stated is not None and stated != payload_bytes:
        yield note(
            "stale-index",
            f"the index counts {stated:,} bytes of weights, the headers {payload_bytes:,}",
            file=INDEX,
            expected=f"{payload_bytes:,} bytes",
            found=f"{stated:,} bytes",
            next="nothing, if every tensor is accounted for: releases count this in different ways",
        )
