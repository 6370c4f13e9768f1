"""Opens a checkpoint directory: configuration, tensors by name, side files, and integrity findings. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, gathered, listing, note, several, what_is
from firstlight.engine.weights.files.double import settled
from firstlight.engine.weights.files.header import Header, TensorInfo, header_bytes, read_header
from firstlight.engine.weights.files.index import (
    CONFIG_LIMIT_BYTES,
    LARGE_BYTES,
    Differences,
    Index,
    against_headers,
    against_payload,
    differences,
    held,
    names_in,
    read_index,
    read_object,
)
from firstlight.engine.weights.files.shards import (
    ADAPTERS,
    OTHER_FORMATS,
    PICKLES,
    nothing,
    only_an_adapter,
    shard_files,
)
from firstlight.engine.weights.files.uncollected import uncollected
from firstlight.engine.weights.slices import byte_runs
from firstlight.engine.weights.sources.base import AnyPath, ByteSource
from firstlight.engine.weights.sources.local import LocalFiles
from firstlight.engine.weights.sources.mirror import (
    in_turn,
    is_url,
    mirror,
    open_source,
    paths_of,
    unversioned,
    with_remote,
)

if TYPE_CHECKING:
    from firstlight.engine.weights.files.lines import Vocabulary
    from firstlight.engine.weights.files.shard_columns import ShardColumns
    from firstlight.engine.weights.files.weight_map import WeightMap
    from firstlight.engine.weights.names.table import Table

T = TypeVar("T")
MANY = 20_000  # tensors from which on columns take the place of objects
_NAME = attrgetter("name")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint directory as its configuration, index and headers describe it; no weight is read.

    `tensors` of very many make entries when they are asked for, and are no dict (`table.py`). `side_files` are the
    other files by name. `findings` holds what is wrong with files, headers and index; `absent` what the index lists and
    no header has, with its file.
    """

    directory: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] | Table
    shards: tuple[str, ...]
    side_files: tuple[str, ...]
    findings: tuple[Finding, ...]
    source: ByteSource
    absent: dict[str, str] | WeightMap = {}

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """Reads config, index and headers of a directory, or of a URL. Raises `Refused` when there is no checkpoint."""
        with uncollected():
            return cls._open(_directory(source))

    @classmethod
    def _open(cls, directory: Path) -> Checkpoint:
        names = _names(directory)
        endings = {Path(name).suffix.lower() for name in names}
        if "config.json" not in names and ".safetensors" not in endings and not endings.isdisjoint(OTHER_FORMATS):
            raise Refused(nothing(directory, names))
        if "config.json" not in names and (adapters := set(ADAPTERS) & set(names)):
            raise Refused(only_an_adapter(directory, min(adapters)))
        config, twice = read_object(directory, "config.json", CONFIG_LIMIT_BYTES)
        index = read_index(directory)
        files, findings = shard_files(directory, names, index)
        findings = [*config_twice(twice), *(index.findings if index else ()), *findings]
        source = open_source(directory)
        _remember(source, files)
        tensors, problems, broken = _headers(directory, source, files, index)
        findings.extend(problems)
        unlike = _unlike(index.weight_map, tensors) if index is not None else None
        if index is not None and unlike is not None:
            invalid = [finding for finding in problems if finding.code == "header-invalid"]
            findings.extend(against_headers(unlike, tensors, files, broken, invalid))
            if not any(finding.severity == "fatal" for finding in findings):
                findings.extend(against_payload(index, payload_bytes(tensors)))
        findings.extend((*_other_files(names), *unversioned(directory)))
        return cls(
            directory=str(directory),
            config=config,
            tensors=tensors,
            shards=tuple(files),
            side_files=tuple(name for name in names if not name.endswith(".safetensors")),
            findings=gathered(findings),
            source=source,
            absent=_absent(unlike.absent if unlike is not None else {}, findings, tensors),
        )

    @property
    def name(self) -> str:
        return Path(urlsplit(self.source.url).path or self.directory).name

    @property
    def payload_bytes(self) -> int:
        return payload_bytes(self.tensors)

    def path(self, file: str) -> Path:
        return Path(self.directory) / file

    def read_bytes(self, name: str, offset_bytes: int = 0, nbytes: int | None = None) -> bytes:
        """Raw bytes of a tensor, or of a run of it; row-major, little-endian. Raises `Refused`."""
        tensor = self.tensors[name]
        nbytes = tensor.nbytes - offset_bytes if nbytes is None else nbytes
        assert offset_bytes >= 0
        assert offset_bytes + nbytes <= tensor.nbytes
        return self._read(tensor, [(tensor.offset_bytes + offset_bytes, nbytes)])

    def read(self, name: str, slices: Sequence[slice] = ()) -> bytes:
        """Raw bytes of a slice of a tensor, row-major, little-endian; reads these bytes only. Raises `Refused`."""
        tensor = self.tensors[name]
        return self._read(tensor, byte_runs(tensor, slices))

    def _read(self, tensor: TensorInfo, runs: Iterable[tuple[int, int]]) -> bytes:
        parts = []
        try:
            opened = self.source.open(tensor.file)
            try:
                for offset, nbytes in runs:
                    parts.append(bytearray(nbytes))
                    opened.read_into(offset, [memoryview(parts[-1])])
                opened.check()
            finally:
                opened.close()
        except Refused as refused:
            raise Refused(_unread(tensor, refused.findings[0])) from refused
        return b"".join(parts)

    def refuse_if_broken(self) -> None:
        """Raises `Refused` with every fatal finding of files, headers and index."""
        broken = [finding for finding in self.findings if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)


def payload_bytes(tensors: dict[str, TensorInfo] | Table) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values()) if isinstance(tensors, dict) else tensors.nbytes


def _absent(
    listed: dict[str, str] | WeightMap, findings: Iterable[Finding], tensors: Mapping[str, TensorInfo]
) -> dict[str, str] | WeightMap:
    """Missing tensors with their files: listed in the index but in no header, or with an invalid header entry."""
    if not isinstance(listed, dict):
        return listed
    wrong = (finding for finding in findings if finding.code == "header-invalid" and finding.file)
    files = {name: str(finding.file) for finding in wrong for name in finding.tensors if name not in tensors}
    return {**files, **listed}


def _unlike(weight_map: dict[str, str] | WeightMap, tensors: dict[str, TensorInfo] | Table) -> Differences:
    """The differences between index and headers."""
    if not tensors:
        return Differences((), (), weight_map, (), "")
    if isinstance(tensors, dict):  # looked up one by one, which an index of columns is slow at
        return differences(weight_map if isinstance(weight_map, dict) else dict(weight_map.items()), tensors)
    from firstlight.engine.weights.files.weight_map import unlike

    return unlike(weight_map, tensors)


def _directory(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    if is_url(text):
        return mirror(text)
    path = Path(text)
    with contextlib.suppress(RuntimeError):  # no such user: the path is taken as it is
        path = path.expanduser()
    if (what := what_is(path)) != "a directory":
        raise Refused(
            fatal(
                "not-found",
                f"{text} is not a checkpoint directory",
                file=text,
                expected="a directory with config.json and .safetensors files",
                found=what,
                next="name the directory that holds config.json",
            )
        )
    return path.resolve()


def _names(directory: Path) -> tuple[str, ...]:
    """Sorted names of the files in the directory, including folders named like a shard, which are refused later."""
    try:
        entries = list(directory.iterdir())
    except OSError as error:
        raise Refused(
            fatal(
                "read-failed",
                f"{directory} cannot be read: {error.strerror}",
                file=str(directory),
                expected="a readable directory",
                found=str(error.strerror),
                next="check the permissions of the directory",
            )
        ) from error
    here = (path.name for path in entries if path.suffix == ".safetensors" or path.is_file())
    return with_remote(directory, here)


def config_twice(keys: tuple[str, ...]) -> Iterable[Finding]:
    """The finding for keys of config.json with two values, if there are any."""
    if keys:
        yield fatal(
            "conflicting-flag",
            f"config.json states {', '.join(keys[:4])} twice with different values",
            file="config.json",
            expected="every key once",
            found=several(len(keys), "key", "keys") + " with two values",
            next="fetch config.json of the release again, or remove the value that is wrong",
        )


def _unread(tensor: TensorInfo, why: Finding) -> Finding:
    return fatal(
        "read-failed",
        f"{tensor.name} cannot be read from {tensor.file}: {why.message}",
        file=tensor.file,
        tensors=(tensor.name,),
        expected=f"{tensor.nbytes:,} bytes at {tensor.offset_bytes:,}",
        found=why.found or why.message,
        next=why.next,
    )


def _remember(source: ByteSource, files: Sequence[str]) -> None:
    """Records size and time of each file before its header is read, so that later changes are noticed."""
    for file in files if isinstance(source, LocalFiles) else ():
        with contextlib.suppress(Refused):  # why it cannot be read is said where its header is
            source.stat(file)


def _headers(
    directory: Path, source: ByteSource, files: Sequence[str], index: Index | None
) -> tuple[dict[str, TensorInfo] | Table, list[Finding], list[str]]:
    """All tensors by name, findings about the files, and the files whose headers could not be read."""
    vocabulary = _vocabulary(index)
    read = _read(paths_of(directory, source, files), index, vocabulary)
    broken = [file for file, header in zip(files, read, strict=True) if isinstance(header, Refused)]
    listed = names_in(index.weight_map, broken) if index is not None and broken else {}
    findings: list[Finding] = []
    for file, header in zip(files, read, strict=True):
        if isinstance(header, Refused):
            findings.extend(_with_tensors(finding, listed.get(file, ())) for finding in header.findings)
        else:
            findings.extend(header.findings)
    weight_map = index.weight_map if index is not None else {}
    sound = [header for header in read if not isinstance(header, Refused)]
    tensors, doubled = _gathered(sound, weight_map, source)
    return tensors, [*findings, *doubled], broken


def _vocabulary(index: Index | None) -> Vocabulary | None:
    """What numbers the patterns of an index of very many tensors; that of the headers is the same."""
    return None if index is None or isinstance(index.weight_map, dict) else index.weight_map.names.vocabulary


def _read(
    paths: Sequence[AnyPath], index: Index | None, vocabulary: Vocabulary | None
) -> list[Header | ShardColumns | Refused]:
    """The header of each file, or why it has none; as columns for very many tensors with usual headers."""
    are_many = header_bytes(paths) >= LARGE_BYTES if index is None else len(index.weight_map) >= MANY
    if not are_many or not paths:
        return list(in_turn(partial(_or_why, read_header), paths))
    from firstlight.engine.weights.files.lines import Vocabulary
    from firstlight.engine.weights.files.shard_columns import read_shard

    as_columns = partial(read_shard, vocabulary=Vocabulary() if vocabulary is None else vocabulary)
    return list(in_turn(partial(_or_why, as_columns), paths))


def _or_why(read: Callable[[AnyPath], T], path: AnyPath) -> T | Refused:
    try:
        return read(path)
    except Refused as refused:
        return refused


def _gathered(
    headers: Sequence[Header | ShardColumns], index: Mapping[str, str], source: ByteSource
) -> tuple[dict[str, TensorInfo] | Table, list[Finding]]:
    """All tensors by name, in the order of files, and findings about duplicates."""
    groups = [header.tensors for header in headers if isinstance(header, Header)]
    columns = [header for header in headers if not isinstance(header, Header)]
    if columns:
        from firstlight.engine.weights.files.copies import settled_rows
        from firstlight.engine.weights.names.table import Table, infos_of

        table = Table.of(headers, columns[0].names.vocabulary)
        if table is not None:
            return settled_rows(table, index, source) if len(table.twice) else (table, [])
        groups = [header.tensors if isinstance(header, Header) else infos_of(header) for header in headers]
    tensors: dict[str, TensorInfo] = {}
    for group in groups:
        tensors.update(zip(map(_NAME, group), group, strict=True))
    every = [tensor for group in groups for tensor in group]
    if len(every) == len(tensors):
        return tensors, []
    chosen, findings = settled(every, index, source)
    return {**tensors, **chosen}, findings


def _with_tensors(finding: Finding, tensors: Sequence[str]) -> Finding:
    """The findings of an unreadable file, with the tensors that the index places in it."""
    if not tensors:
        return finding
    message = f"{finding.message}; the index places {held(tensors)} in it"
    return msgspec.structs.replace(finding, message=message, **listing(tensors))


def _other_files(names: Iterable[str]) -> Iterable[Finding]:
    """Notes about files that could run code, none of which is opened."""
    names = tuple(names)
    others = [name for name in names if Path(name).suffix.lower() in OTHER_FORMATS and not name.endswith(PICKLES)]
    if others:
        kind = OTHER_FORMATS[Path(others[0]).suffix.lower()]
        yield note("shadowed-file", f"not read: {', '.join(others[:4])} ({kind})", file=others[0])
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        yield note(
            "unsafe-file", f"pickled files are present and are never read: {', '.join(pickles)}", file=pickles[0]
        )
    code = [name for name in names if name.endswith(".py")]
    if code:
        said = f"the checkpoint brings code, which runs with --trust-remote-code alone: {', '.join(code)}"
        yield note("remote-code", said, file=code[0])
