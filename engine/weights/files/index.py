"""Reads the index of a sharded checkpoint within size limits and checks it against the headers of the shards.

Headers are the truth; the index only decides which files belong to the release. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, eq
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, listing, note, several, warning
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.files.json_text import colons, decode, keys_twice, why_no_json
from firstlight.engine.weights.names.listed import Listed

if TYPE_CHECKING:
    from firstlight.engine.weights.files.weight_map import WeightMap

INDEX = "model.safetensors.index.json"
CONFIG_LIMIT_BYTES = 64 << 20
INDEX_LIMIT_BYTES = 256 << 20  # 497,220 tensors take 60 MB
LARGE_BYTES = 4 << 20  # from which on columns are worth the trouble


class Index(msgspec.Struct, frozen=True):
    """Tensor name -> file, the total size that the index states, and findings about the index itself."""

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
    """As `_sound`, much faster, for an index of very many tensors; else None."""
    from firstlight.engine.weights.files.weight_map import read_weight_map

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
    """The structure of a usual index."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


_decode_plain = msgspec.json.Decoder(_Plain).decode


def _sound(text: bytes) -> Index | None:
    """The index if nothing about it is unusual; else None, and it is parsed closely."""
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
    """Whether it is certain that no key occurs twice."""
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
    """What was found instead of a valid map: its first invalid entry, if it is a map."""
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
            f"{INDEX} lists {several(len(twice), 'key', 'keys')} twice with different values",
            file=INDEX,
            tensors=twice,
            expected="every tensor in one file",
            found="two files for one tensor",
            next="fetch the index again, or delete it: headers are enough",
        )


def _refuse_paths(files: set[str]) -> None:
    """Refuses paths: a shard must be a plain file in the directory itself."""
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


def names_in(weight_map: dict[str, str] | WeightMap, files: Iterable[str]) -> dict[str, Sequence[str]]:
    """The tensors that an index places in each of these files, sorted; of very many, kind by kind."""
    if not isinstance(weight_map, dict):
        found_in = {file: weight_map.names_in(file) for file in files}
        return {file: sorted(names) if isinstance(names, list) else names for file, names in found_in.items()}
    found: dict[str, list[str]] = {file: [] for file in files}
    for name, file in weight_map.items():
        if file in found:
            found[file].append(name)
    return {file: sorted(names) for file, names in found.items()}


_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_LAYERS = re.compile(r"(?:^|\.)layers\.\*\.")


def held(tensors: Sequence[str]) -> str:
    """What a file holds, in words: `14 tensors of layers 3 to 5`, `15 tensors: 14 of layer 3, 1 of no layer`."""
    count = several(len(tensors), "tensor", "tensors")
    layers, of_layers = _layers_of(tensors)
    if not layers:
        return count
    low, high, apart = min(layers), max(layers), len(tensors) - of_layers
    which = f"layer {low}" if low == high else f"layers {low} to {high}"
    return f"{count}: {of_layers:,} of {which}, {apart:,} of no layer" if apart else f"{count} of {which}"


def _layers_of(tensors: Sequence[str]) -> tuple[set[int], int]:
    """The layers that tensors are of, and how many of them are of any."""
    if not isinstance(tensors, Listed):
        found = [int(match[1]) for match in map(_LAYER.search, tensors) if match is not None]
        return set(found), len(found)
    layers, count = set[int](), 0
    for pattern, group in tensors.by_pattern().items():
        if (match := _LAYERS.search(pattern)) is not None:
            layers.update(group.columns[pattern[: match.start()].count("*")])
            count += len(group)
    return layers, count


class Differences(NamedTuple):
    """Differences between an index and the headers.

    `unlisted`: tensors that the index lacks, in `unlisted_files`. `absent`: tensors that no header has, with their file
    by the index. `moved`: tensors in other files than the index says, which has the first of them in `moved_from`.
    """

    unlisted: Sequence[str]
    unlisted_files: Sequence[str]
    absent: dict[str, str] | WeightMap
    moved: Sequence[str]
    moved_from: str


def differences(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> Differences:
    """Differences between an index and the headers, compared name by name."""
    if len(index) == len(tensors) and all(map(eq, map(index.get, tensors), map(attrgetter("file"), tensors.values()))):
        return Differences((), (), {}, (), "")
    unlisted = [name for name in tensors if name not in index]
    moved = [name for name, file in index.items() if name in tensors and tensors[name].file != file]
    return Differences(
        unlisted,
        sorted({tensors[name].file for name in unlisted}),
        {name: file for name, file in index.items() if name not in tensors},
        moved,
        index[moved[0]] if moved else "",
    )


def against_headers(
    found: Differences,
    tensors: Mapping[str, TensorInfo],
    files: Iterable[str],
    broken: Iterable[str],
    invalid: Sequence[Finding] = (),
) -> Iterator[Finding]:
    """Findings from comparing the index with the headers of the files that were read.

    `broken`: files without a usable header. `invalid`: tensors whose header entries are already known to be wrong.
    """
    if unlisted := found.unlisted:
        yield warning(
            "unlisted-tensor",
            f"{several(len(unlisted), 'tensor is', 'tensors are')} present in shards but unlisted "
            "in the index; headers are the truth",
            file=INDEX,
            **listing(unlisted),
            expected="every tensor listed",
            found=f"present in shard, unlisted: {', '.join(found.unlisted_files[:4])}",
            next="rebuild the index; the tensors are used as found",
        )
    for file, names in _of_readable(found.absent, set(files) - set(broken), invalid):
        yield fatal(
            "stale-index",
            f"the index places {held(names)} in {file} that its header does not have",
            file=file,
            **listing(names),
            expected=f"{several(len(names), 'tensor', 'tensors')} in {file}",
            found="absent",
            next="fetch index and shard again from the same revision",
        )
    if moved := found.moved:
        yield warning(
            "stale-index",
            f"{several(len(moved), 'tensor is', 'tensors are')} in other shards than the index says; headers are the "
            "truth",
            file=INDEX,
            **listing(moved),
            expected=f"{moved[0]} in {found.moved_from}",
            found=f"in {tensors[moved[0]].file}",
            next="rebuild the index; the tensors are used as found",
        )


def _of_readable(
    absent: dict[str, str] | WeightMap, readable: set[str], invalid: Sequence[Finding]
) -> Iterator[tuple[str, Sequence[str]]]:
    """The absent tensors of each of these files but for those that are there and invalid."""
    said = {name for finding in invalid for name in finding.tensors}
    if isinstance(absent, dict):
        lists: dict[str, list[str]] = defaultdict(list)
        for name, file in absent.items():
            lists[file].append(name)
        found: Mapping[str, Sequence[str]] = lists
    else:
        found = {file: absent.names_in(file) for file in absent.files if file in readable}
    for file, names in found.items():
        if isinstance(names, list):
            names = [name for name in names if name not in said]
        elif len(names) == sum(len(one.tensors) + one.more_tensors for one in invalid if one.file == file):
            continue
        if names and file in readable:
            yield file, names


def against_payload(index: Index, payload_bytes: int) -> Iterator[Finding]:
    """Compares the total size in the index with that of the headers; a note, since releases count it differently."""
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
