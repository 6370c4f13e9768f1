"""A checkpoint directory: configuration, tensors by name, side files, and what is wrong with them. No torch."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.weights.header import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a directory says about its weights without reading one: the raw configuration is the truth.

    `side_files` are the other files by name. `findings` holds what is wrong with files, headers and index.
    """

    directory: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    side_files: tuple[str, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """Reads config, index and headers. Raises `Refused` when there is no checkpoint to speak of at all."""
        directory = _directory(source)
        config = _read_json(directory, "config.json")
        index = _read_index(directory)
        files, findings = _shards(directory, index)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            header, problems = _header(directory / file)
            findings.extend(problems)
            findings.extend(_merge(tensors, header, index))
        findings.extend(_against_headers(index, tensors, files))
        findings.extend(_other_files(directory))
        side = tuple(sorted(p.name for p in directory.iterdir() if p.is_file() and p.suffix != ".safetensors"))
        return cls(
            directory=str(directory),
            config=config,
            tensors=tensors,
            shards=tuple(files),
            side_files=side,
            findings=tuple(findings),
        )

    @property
    def name(self) -> str:
        return Path(self.directory).name

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def path(self, file: str) -> Path:
        return Path(self.directory) / file

    def read_bytes(self, name: str, offset_bytes: int = 0, nbytes: int | None = None) -> bytes:
        """Raw bytes of a tensor, or of a run of it; row-major, little-endian."""
        tensor = self.tensors[name]
        nbytes = tensor.nbytes - offset_bytes if nbytes is None else nbytes
        assert offset_bytes >= 0
        assert offset_bytes + nbytes <= tensor.nbytes
        with self.path(tensor.file).open("rb") as stream:
            stream.seek(tensor.offset_bytes + offset_bytes)
            return stream.read(nbytes)

    def refuse_if_broken(self) -> None:
        """Raises `Refused` with every fatal finding of files, headers and index."""
        broken = [finding for finding in self.findings if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)


def _directory(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    if "://" in text:
        raise Refused(
            fatal(
                "not-available",
                f"{text}: reading a checkpoint over the network is not built yet",
                expected="a directory",
                found=text,
                next="copy or mount the checkpoint and name its directory",
            )
        )
    path = Path(text).expanduser()
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing of that name"
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


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    if not path.is_file():
        raise Refused(
            fatal(
                "missing-side-file",
                f"{directory} has no {name}",
                file=name,
                expected=name,
                found=", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "an empty directory",
                next=f"fetch {name} of the release",
            )
        )
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(
            fatal("side-file-invalid", f"{name} is not JSON: {error}", file=name, next=f"fetch {name} again")
        ) from error
    if not isinstance(value, dict):
        raise Refused(fatal("side-file-invalid", f"{name} is not a JSON object", file=name, found=type(value).__name__))
    return value


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file as the index has it, or None without an index."""
    if not (directory / INDEX).is_file():
        return None
    weight_map = _read_json(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise Refused(
            fatal(
                "stale-index",
                f"{INDEX} has no usable weight_map",
                file=INDEX,
                expected="weight_map: {tensor: file}",
                found=type(weight_map).__name__,
                next="fetch the index again, or delete it: headers are enough",
            )
        )
    outside = sorted({file for file in weight_map.values() if Path(file).name != file or file in ("", "..")})
    if outside:
        raise Refused(
            fatal(
                "unsafe-file",
                f"{INDEX} points outside the directory",
                file=INDEX,
                expected="plain file names",
                found=", ".join(outside[:4]),
                next="do not use this checkpoint before you know where it comes from",
            )
        )
    return weight_map


def _shards(directory: Path, index: dict[str, str] | None) -> tuple[list[str], list[Finding]]:
    """The shard files to read, and findings about absent and unlisted ones."""
    present = sorted(p.name for p in directory.glob("*.safetensors"))
    if index is not None:
        by_file: dict[str, list[str]] = defaultdict(list)
        for tensor, file in index.items():
            by_file[file].append(tensor)
        missing = [
            _missing(file, tuple(sorted(names))) for file, names in sorted(by_file.items()) if file not in present
        ]
        extra = [file for file in present if file not in by_file]
        unlisted = [
            warning(
                "stale-index",
                f"{file} is not in the index and is not read",
                file=file,
                next="a consolidated copy can stay; a shard of the release means that the index is stale",
            )
            for file in extra
        ]
        return [file for file in sorted(by_file) if file in present], missing + unlisted
    if "model.safetensors" in present:
        present = ["model.safetensors"]
    findings = []
    totals = {m[3]: m[1] for m in (_NUMBERED.fullmatch(file) for file in present) if m}
    for total, stem in totals.items():
        for number in range(1, int(total) + 1):
            file = f"{stem}-{number:05d}-of-{total}.safetensors"
            if file not in present:
                findings.append(_missing(file, ()))
    if not present and not findings:
        raise Refused(
            fatal(
                "missing-shard",
                f"{directory} holds no .safetensors file",
                file=str(directory),
                expected="model.safetensors, or shards with an index",
                found=", ".join(sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLES)) or "none",
                next="fetch the safetensors files; pickled weights are not read",
            )
        )
    return present, findings


def _missing(file: str, tensors: tuple[str, ...]) -> Finding:
    held = f", which holds {len(tensors):,} tensors" if tensors else ""
    return fatal(
        "missing-shard",
        f"{file} is not there{held}",
        file=file,
        tensors=tensors,
        expected=file,
        found="absent",
        next=f"fetch {file}",
    )


def _header(path: Path) -> tuple[Header | None, list[Finding]]:
    try:
        header = read_header(path)
    except Refused as refused:
        return None, list(refused.findings)
    return header, list(header.findings)


def _merge(tensors: dict[str, TensorInfo], header: Header | None, index: dict[str, str] | None) -> Iterable[Finding]:
    """Adds a shard's tensors; of two copies the index decides, and without its word neither is trusted."""
    for tensor in header.tensors if header else ():
        earlier = tensors.get(tensor.name)
        if earlier is None:
            tensors[tensor.name] = tensor
            continue
        chosen = index.get(tensor.name) if index else None
        if chosen == tensor.file:
            tensors[tensor.name] = tensor
        decided = chosen in (tensor.file, earlier.file)
        yield msgspec.structs.replace(
            warning(
                "duplicate-tensor",
                f"{tensor.name} is in {earlier.file} and in {tensor.file}"
                + (f"; the index names {chosen}" if decided else ""),
                file=tensor.file,
                tensors=(tensor.name,),
                expected="one copy",
                found="two",
                next="delete the stale shard",
            ),
            severity="warning" if decided else "fatal",
        )


def _against_headers(
    index: dict[str, str] | None, tensors: dict[str, TensorInfo], files: list[str]
) -> Iterable[Finding]:
    if index is None:
        return
    unlisted = tuple(name for name in tensors if name not in index)
    if unlisted:
        yield warning(
            "unlisted-tensor",
            f"{len(unlisted):,} tensors are present in shards but unlisted in the index; headers are the truth",
            file=INDEX,
            tensors=unlisted,
            expected="every tensor listed",
            found="present in shard, unlisted",
            next="rebuild the index; the tensors are used as found",
        )
    absent: dict[str, list[str]] = defaultdict(list)
    for name, file in index.items():
        if file in files and name not in tensors:
            absent[file].append(name)
    for file, names in absent.items():
        yield fatal(
            "stale-index",
            f"the index places {len(names):,} tensors in {file} that its header does not have",
            file=file,
            tensors=tuple(names),
            expected=f"in {file}",
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
            expected=index[moved[0]],
            found=tensors[moved[0]].file,
            next="rebuild the index",
        )


def _other_files(directory: Path) -> Iterable[Finding]:
    """Files that could run code are named; none of them is opened."""
    names = sorted(p.name for p in directory.iterdir() if p.is_file())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        yield note(
            "unsafe-file", f"pickled files are present and are never read: {', '.join(pickles)}", file=pickles[0]
        )
    code = [name for name in names if name.endswith(".py")]
    if code:
        yield note("remote-code", f"the checkpoint brings code, which was not run: {', '.join(code)}", file=code[0])
