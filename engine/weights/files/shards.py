"""Decides which files of a directory are the release's weights, and which shards are missing. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, listing, note, several, warning
from firstlight.engine.weights.files.index import INDEX, Index, files_of, held, names_in

if TYPE_CHECKING:
    from firstlight.engine.weights.files.weight_map import WeightMap

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_FORMATS = {
    **dict.fromkeys(PICKLES, "pickled weights, which could run code"),
    ".gguf": "GGUF, weights in formats of their own",
    ".ggml": "GGML, weights in formats of their own",
    ".h5": "Keras or TensorFlow weights",
    ".msgpack": "Flax weights",
    ".onnx": "an ONNX graph",
    ".npz": "numpy arrays",
}
SINGLE = "model.safetensors"
ADAPTERS = ("adapter_model.safetensors", "adapters.safetensors")  # of peft and of MLX
CONSOLIDATED = "consolidated"  # how the file names of a vendor's own second copy begin
FORK = "._"  # how the names of macOS's attributes of a file begin
_UNFINISHED = (".incomplete", ".part", ".partial", ".tmp", ".aria2", ".crdownload", ".download")
_TAKEN = (".json", ".jinja", ".model")  # how the names of other files end that are read
_CONTROL = (".aria2", ".st")  # what downloads that reserve the whole file first keep beside it until they are done
_NUMBERED = re.compile(r"(?P<stem>.+?)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_MOST_NAMED = 1000  # absent shards that are named one by one

Series = tuple[str, str]  # what the names of the shards of one release share: the stem, and the total as written


def shard_files(directory: Path, names: tuple[str, ...], index: Index | None) -> tuple[list[str], list[Finding]]:
    """The shard files to read, in order, with findings about missing and ignored ones."""
    forks = [name for name in names if name.startswith(FORK)]
    found = [name for name in names if name.endswith(".safetensors") and name not in forks]
    present = [name for name in found if name not in ADAPTERS]
    if not present and found:
        raise Refused(only_an_adapter(directory, found[0]))
    if index is not None:
        files, findings = _by_index(names, present, index.weight_map)
    else:
        files, findings = _by_name(names, present)
    if not files and not findings:
        raise Refused(nothing(directory, names, index))
    unwritten = (*_unfinished(files, names), *_holes(directory, files))
    beside = [name for name in names if name not in files and name.endswith(_TAKEN)]
    return files, [*findings, *unwritten, *_forks(forks), *_unapplied(names), *_links(directory, [*files, *beside])]


def _forks(names: Sequence[str]) -> Iterator[Finding]:
    """AppleDouble files (`._name`), which macOS creates when it copies to other file systems."""
    if names:
        yield note(
            "shadowed-file",
            f"not read: {', '.join(names[:4])}: attributes of files, as macOS copies them beside each",
            file=names[0],
        )


def only_an_adapter(directory: Path, file: str) -> Finding:
    """The finding for a directory that holds an adapter (LoRA) without its base model."""
    return fatal(
        "missing-shard",
        f"{directory} holds an adapter (LoRA or the like), and not the model that it changes",
        file=file,
        expected=f"{SINGLE}, or shards with an index",
        found=file,
        next="merge the adapter into its base model (peft: merge_and_unload), and name the directory of the result",
    )


def _unapplied(files: Iterable[str]) -> Iterator[Finding]:
    for file in files:
        if file in ADAPTERS or file == "adapter_model.bin":
            yield warning(
                "shadowed-file",
                f"{file} is an adapter (LoRA or the like) and is not applied: what is read is the model beside it",
                file=file,
                expected="a model alone",
                found=f"{file} beside it",
                next="merge it into the model (peft: merge_and_unload) if its answers are meant, or take it away",
            )


def _by_index(
    names: tuple[str, ...], present: list[str], weight_map: dict[str, str] | WeightMap
) -> tuple[list[str], list[Finding]]:
    findings: list[Finding] = []
    listed = sorted(files_of(weight_map))
    there = set(present)
    unread = [file for file in listed if file not in there]
    if len(unread) > _MOST_NAMED:
        findings.append(_most_listed_missing(unread, len(listed)))
    elif unread:
        held_in = names_in(weight_map, unread)
        findings.extend(
            _missing(file, names, held_in[file])
            if file.lower().endswith(".safetensors")
            else _not_readable(file, held_in[file])
            for file in unread
        )
    series = {found for file in listed if (found := _series(file)) is not None}
    if len(series) > _MOST_NAMED:
        series = {found for file in present if (found := _series(file)) is not None} & series
    siblings = [file for file in present if file not in listed and _series(file) in series]
    findings.extend(_unlisted(file) for file in siblings)
    for numbers in series:
        absent = _absent_of(numbers, {*present, *listed})
        if absent:
            findings.append(_unlisted_and_absent(absent))
    files = sorted([file for file in listed if file in there] + siblings)
    aside = [file for file in present if file not in files]
    instead = any(finding.code == "missing-shard" for finding in findings) and SINGLE in aside
    findings.extend(_aside(aside, "the index does not list", files, whole=instead))
    return files, findings


def _by_name(names: tuple[str, ...], present: list[str]) -> tuple[list[str], list[Finding]]:
    if SINGLE in present:
        return [SINGLE], [*_aside([file for file in present if file != SINGLE], "beside the whole model", [SINGLE])]
    copies = [file for file in present if file.startswith(CONSOLIDATED)]
    findings: list[Finding] = []
    if copies and len(copies) < len(present):
        present = [file for file in present if file not in copies]
        findings.extend(_aside(copies, "by its name a second copy", present))
    for numbers in sorted({found for file in present if (found := _series(file)) is not None}):
        absent = _absent_of(numbers, set(present))
        if len(absent) <= _MOST_NAMED:
            findings.extend(_missing(file, names, ()) for file in absent)
        else:
            findings.append(_most_missing(numbers, absent))
    return present, findings


def _series(file: str) -> Series | None:
    found = _NUMBERED.fullmatch(file)
    return (found["stem"], found["total"]) if found else None


def _absent_of(series: Series, there: set[str]) -> list[str]:
    """The names that complete a series, as its own names are written: `00002` or `2`. A sane total is assumed."""
    stem, total = series
    found = [m for m in (_NUMBERED.fullmatch(file) for file in there) if m and (m["stem"], m["total"]) == series]
    width = max(len(m["number"]) for m in found) if any(m["number"].startswith("0") for m in found) else 1
    numbers = {int(m["number"]) for m in found}
    count = min(int(total), len(numbers) + 10 * _MOST_NAMED)
    first = 0 if 0 in numbers else 1
    wanted = range(first, first + count)
    return [f"{stem}-{n:0{width}d}-of-{total}.safetensors" for n in wanted if n not in numbers]


def _missing(file: str, names: Iterable[str], tensors: Sequence[str]) -> Finding:
    started = [name for name in names if name.startswith(file) and name.endswith(_UNFINISHED)]
    alike = [name for name in names if name != file and name.lower() == file.lower()]
    found, way = "absent", f"fetch {file}"
    if started:
        found = f"an unfinished download: {started[0]}"
    elif alike:
        found, way = f"{alike[0]}, spelt otherwise", f"rename {alike[0]} to {file}"
    return fatal(
        "missing-shard",
        f"{file} is not there" + (f", which holds {held(tensors)}" if tensors else ""),
        file=file,
        **listing(tensors),
        expected=file,
        found=found,
        next=way,
    )


def _most_missing(series: Series, absent: list[str]) -> Finding:
    stem, total = series
    return fatal(
        "missing-shard",
        f"of {int(total):,} shards that the file names count most are not there",
        file=absent[0],
        expected=f"{stem}-1 to {stem}-{total}",
        found=f"at least {len(absent):,} absent, {absent[0]} first",
        next="fetch the shards, or rename the file if it is whole",
    )


def _most_listed_missing(unread: Sequence[str], listed: int) -> Finding:
    return fatal(
        "missing-shard",
        f"{len(unread):,} of {listed:,} files that the index names are not there or no safetensors files",
        file=INDEX,
        expected=f"{unread[0]} and {len(unread) - 1:,} others",
        found="absent, or no .safetensors files",
        next="fetch the index of this release: no release has so many files",
    )


def _not_readable(file: str, tensors: Sequence[str]) -> Finding:
    return fatal(
        "unsafe-file" if file.endswith(PICKLES) else "not-safetensors",
        f"the index places {held(tensors)} in {file}, which is no safetensors file",
        file=file,
        **listing(tensors),
        expected="a .safetensors file",
        found=file,
        next="fetch the safetensors files of the release and their index; pickled weights are not read",
    )


def _unlisted(file: str) -> Finding:
    return warning(
        "stale-index",
        f"{file} is not in the index, but is of the same series; its tensors are used as found",
        file=file,
        expected=f"{file} in {INDEX}",
        found="unlisted",
        next="fetch the index again: it is not that of these shards",
    )


def _unlisted_and_absent(absent: list[str]) -> Finding:
    return warning(
        "stale-index",
        f"the names of the shards count further than the index: {absent[0]}"
        + (f" and {len(absent) - 1:,} more" if len(absent) > 1 else "")
        + " neither listed nor there",
        file=INDEX,
        expected=absent[0],
        found="unlisted and absent",
        next="the account of parameters says whether anything is missing; if so, fetch index and shards again",
    )


def _aside(files: list[str], reason: str, used: list[str], whole: bool = False) -> Iterator[Finding]:
    """Notes about weight files that are not read, and which are read instead."""
    if not files:
        return
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    instead = f"{used[0]}{f' to {used[-1]}' if len(used) > 1 else ''}" if used else "nothing"
    way = f"delete {INDEX} if {SINGLE} is the whole model" if whole else "delete what is a stale copy"
    yield warning(
        "shadowed-file",
        f"not read: {shown} ({reason}); what is read is {instead}",
        file=files[0],
        expected="one set of weights",
        found=f"{shown} beside {instead}",
        next=way + ("; other tools read model.safetensors first" if SINGLE in files else ""),
    )


def nothing(directory: Path, names: Iterable[str], index: Index | None = None) -> Finding:
    """The finding for a directory without readable weights, with what it holds instead."""
    others = {name: kind for name in names if (kind := OTHER_FORMATS.get(Path(name).suffix.lower()))}
    names = [name for name in names if not name.startswith(FORK)]
    started = [name for name in names if name.endswith(_UNFINISHED)]
    misspelt = [name for name in names if name.lower().endswith(".safetensors") and not name.endswith(".safetensors")]
    found, way, kind = "no weights", "fetch the safetensors files of the release", ""
    below = sorted(directory.glob("*/*.safetensors"))
    if misspelt:
        found, way = f"{misspelt[0]}, whose name ends in other letters", "rename the files: names end in .safetensors"
    elif started:
        found, way = f"unfinished downloads: {', '.join(started[:4])}", "finish the download; a part is not read"
    elif others:
        found, kind = ", ".join(list(others)[:8]), f" ({next(iter(others.values()))})"
        other = "pickled weights" if Path(next(iter(others))).suffix.lower() in PICKLES else "other formats"
        way = f"fetch the safetensors files of the release; {other} are not read"
    elif below:
        inside = below[0].relative_to(directory)
        found, way = f"{inside}, in a folder of it", f"put config.json beside {below[0].name}, and name that folder"
    return fatal(
        "missing-shard",
        f"{directory} holds no .safetensors file" + (f", but {found}{kind}" if found != "no weights" else ""),
        file=str(directory),
        expected=f"{SINGLE}, or shards with an index" if index is None else "the shards, and an index that lists them",
        found=found,
        next=way,
    )


def _unfinished(files: Iterable[str], names: Sequence[str]) -> Iterator[Finding]:
    """Findings for preallocated shards of an unfinished download."""
    there = set(names)
    for file, control in ((file, file + ending) for file in files for ending in _CONTROL):
        if control in there:
            yield fatal(
                "unwritten-bytes",
                f"{file} is an unfinished download of full size: {control}, which goes when it is done, is there",
                file=file,
                expected=f"{file} alone",
                found=control,
                next=f"finish the download; delete {control} only if you know that {file} is whole",
            )


def _holes(directory: Path, files: Iterable[str]) -> Iterator[Finding]:
    """Findings for sparse shards with holes, as an interrupted download or copy leaves them."""
    found = [(file, *hole) for file in files if (hole := _hole(directory / file)) is not None]
    if found:
        file, start, size = found[0]
        more = f", and {several(len(found) - 1, 'shard', 'shards')} more" if len(found) > 1 else ""
        yield warning(
            "unwritten-bytes",
            f"{file} was never written from byte {start:,} of {size:,} on{more}: it reads as zeros there",
            file=file,
            expected=f"{size:,} bytes written",
            found=f"a hole from byte {start:,} on",
            next="finish the download or copy, unless the file system itself leaves out zeros",
        )


def _hole(path: Path) -> tuple[int, int] | None:
    """Offset and size of the first hole of a file; None if there is none or the system cannot tell."""
    try:
        if not path.is_file():
            return None
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = os.lseek(stream.fileno(), 0, os.SEEK_HOLE)
    except (AttributeError, OSError):
        return None
    return (start, size) if start < size else None


def _links(directory: Path, files: Iterable[str]) -> Iterator[Finding]:
    """Notes about links that leave the directory at last, except to blobs of a Hugging Face cache."""
    homes = [os.path.realpath(home) for home in (directory, directory.parent.parent / "blobs")]
    out = []
    for file in files:
        if (directory / file).is_symlink():
            target = Path(os.path.realpath(directory / file))
            if not any(target.is_relative_to(home) for home in homes):
                out.append((file, str(target)))
    if out:
        yield note(
            "unsafe-file",
            f"{several(len(out), 'file is a link', 'files are links')} that {'leads' if len(out) == 1 else 'lead'} "
            f"out of the directory: {out[0][0]} -> {out[0][1]}",
            file=out[0][0],
            expected="files of this directory",
            found=f"{out[0][0]} -> {out[0][1]}",
            next="nothing, if you made them",
        )
