"""A manifest: the hash of every tensor and side file of a checkpoint, to hold another copy of it against. No torch.

Tensors are compared by name, dtype, shape and contents, whatever shards they lie in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, several, warning
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.json_text import why_no_json
from firstlight.workbench.deep import TensorReading
from firstlight.workbench.report import write_atomically

LIMIT_BYTES = 1 << 30
SIDE_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # what changes answers; a README does not
SIDE_FILE_LIMIT_BYTES = 1 << 30


Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256
FileName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\]+$")]  # beside the weights: nothing leads elsewhere


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: what it is and the SHA-256 of its bytes."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    sha256: Hash


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a checkpoint by content. `files` are those beside the weights: name -> SHA-256."""

    format: Literal["firstlight-manifest-1"] = "firstlight-manifest-1"
    name: str
    tensors: dict[str, Entry]
    files: dict[FileName, Hash]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON in one step. Raises `Refused` when the place cannot be written."""
        write_atomically(path, msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """A manifest from its file. Raises `Refused`: not-found, side-file-invalid."""
        file = Path(path)
        try:
            if not file.is_file():
                raise Refused(_unusable(file, "not-found", "it is not there" if not file.exists() else "it is no file"))
            if file.stat().st_size > LIMIT_BYTES:
                raise Refused(_unusable(file, "side-file-invalid", f"it is larger than {LIMIT_BYTES:,} bytes"))
            text = file.read_bytes()
            return msgspec.json.decode(text, type=cls)
        except OSError as error:
            raise Refused(_unusable(file, "read-failed", str(error.strerror))) from error
        except (msgspec.ValidationError, RecursionError) as error:
            raise Refused(_unusable(file, "side-file-invalid", str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(_unusable(file, "side-file-invalid", f"it {why_no_json(text, error)[0]}")) from error


def _unusable(file: Path, code: str, problem: str) -> Finding:
    return fatal(
        code,
        f"the manifest {file} cannot be used: {problem}",
        file=str(file),
        expected="a file written by scan --manifest",
        found=problem,
        next="name another file, or write one with scan --manifest FILE on a copy that is right",
    )


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Refuses a place for a manifest before terabytes are read for it."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise Refused(
            fatal(
                "not-found",
                f"no manifest can be written to {path}",
                file=str(path),
                expected="a file in a folder that exists and may be written",
                found="a folder" if Path(path).is_dir() else f"{folder}, which is not such a folder",
                next="name another file",
            )
        )


def manifest_of(checkpoint: Checkpoint, readings: Iterable[TensorReading]) -> Manifest:
    """The manifest of what was read. Raises `Refused` when a side file cannot be read."""
    tensors = checkpoint.tensors
    return Manifest(
        name=checkpoint.name,
        tensors={
            reading.tensor: Entry(tensors[reading.tensor].dtype, tensors[reading.tensor].shape, reading.sha256)
            for reading in readings
        },
        files=dict(_side_files(checkpoint)),
    )


def _side_files(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    for name in checkpoint.side_files:
        path = checkpoint.path(name)
        if name.endswith(".index.json") or not name.endswith(SIDE_FILES):  # another cut is the same release
            continue
        try:
            if path.stat().st_size <= SIDE_FILE_LIMIT_BYTES:
                with path.open("rb") as stream:
                    yield name, hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise Refused(
                fatal(
                    "read-failed",
                    f"{name} cannot be read: {error.strerror}",
                    file=name,
                    expected="a readable file",
                    found=str(error.strerror),
                    next="check the permissions of the file",
                )
            ) from error


def differences(mine: Manifest, other: Manifest) -> Iterator[Finding]:
    """What this checkpoint has otherwise than the manifest says; fatal for tensors, a warning for side files."""
    absent = [name for name in other.tensors if name not in mine.tensors]
    extra = [name for name in mine.tensors if name not in other.tensors]
    called = _called_otherwise(absent, extra, mine, other)
    absent, extra = (
        [name for name in names if name not in taken] for names, taken in zip((absent, extra), called, strict=True)
    )
    both = [(name, mine.tensors[name], entry) for name, entry in other.tensors.items() if name in mine.tensors]
    form = [name for name, own, entry in both if (own.dtype, own.shape) != (entry.dtype, entry.shape)]
    other_form = set(form)
    contents = [name for name, own, entry in both if own.sha256 != entry.sha256 and name not in other_form]
    if called[0]:
        name, here = next(iter(called[0].items()))
        way = "rename the tensors, if only names are to differ: what they hold is right"
        yield _differs(list(called[0].values()), "are called otherwise than in the manifest", name, here, way)
    if absent:
        yield _differs(absent, "are in the manifest and not here", "in the manifest", "absent")
    if extra:
        yield _differs(extra, "are here and not in the manifest", "absent from the manifest", "here")
    if form:
        own, entry = mine.tensors[form[0]], other.tensors[form[0]]
        yield _differs(form, "have another dtype or shape than in the manifest", _form(entry), _form(own))
    if contents:
        own, entry = mine.tensors[contents[0]], other.tensors[contents[0]]
        owner = next((name for name, there in other.tensors.items() if there == own), None)
        found = own.sha256 + (f", the contents of {owner} there" if owner is not None else "")
        yield _differs(contents, "have other contents than in the manifest", entry.sha256, found)
    yield from _file_differences(mine.files, other.files)


def _form(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _called_otherwise(
    absent: Sequence[str], extra: Sequence[str], mine: Manifest, other: Manifest
) -> tuple[dict[str, str], dict[str, str]]:
    """What is here under another name, by the manifest's names and by ours; contents that occur twice tell nothing."""
    there, here = (_once(names, of_it) for names, of_it in ((absent, other), (extra, mine)))
    both = {name: here[entry] for entry, name in there.items() if entry in here}
    return both, {own: name for name, own in both.items()}


def _once(names: Iterable[str], manifest: Manifest) -> dict[tuple[str, tuple[int, ...], str], str]:
    """Names by what they hold, of what occurs once."""
    found: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name in names:
        entry = manifest.tensors[name]
        found.setdefault((entry.dtype, entry.shape, entry.sha256), []).append(name)
    return {key: of_it[0] for key, of_it in found.items() if len(of_it) == 1}


def _differs(
    names: list[str],
    how: str,
    expected: str,
    found: str,
    next: str = "fetch the files that hold these tensors again, or find out which of the two copies is right",
) -> Finding:
    how = how.replace("have ", "has ").replace("are ", "is ") if len(names) == 1 else how
    return fatal(
        "manifest-mismatch",
        f"{several(len(names), 'tensor', 'tensors')} {how}: {names[0]}{' first' if len(names) > 1 else ''}",
        tensors=tuple(names),
        expected=expected,
        found=found,
        next=next,
    )


def _file_differences(mine: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(mine.keys() | other.keys()):
        own, theirs = mine.get(name, "absent"), other.get(name, "absent")
        if own != theirs:
            yield warning(
                "manifest-mismatch",
                f"{name} is not that of the manifest"
                + (": absent here" if own == "absent" else ": not in the manifest" if theirs == "absent" else ""),
                file=name,
                expected=theirs,
                found=own,
                next=f"fetch {name} from the same revision as the manifest's",
            )
