"""Findings as data: what is wrong or worth knowing about a checkpoint, with the list of all codes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

Severity = Literal["fatal", "warning", "note"]
MOST_TENSORS = 1000  # that a finding names; it counts the others
MOST_FILES = 16  # that have a finding each where all have the same fault
_OWN = re.compile(r"'[^']*'|\S*\.\w\S*|\d[\d,]*")  # names and numbers: what findings of one fault do not share

CODES: dict[str, str] = {
    # files and headers
    "missing-shard": "the index names a shard that is not there",
    "stale-index": "the index disagrees with the headers of the shards",
    "unlisted-tensor": "a shard holds a tensor that the index does not list",
    "duplicate-tensor": "the same tensor name occurs in two shards",
    "shadowed-file": "a file of weights that is left aside since another one is read",
    "truncated-shard": "a shard is shorter than its header says",
    "unwritten-bytes": "a shard has its full size, but parts of it were never written",
    "read-failed": "the system could not read a part of a file",
    "changed-file": "a file changed while it was being read",
    "differing-copies": "hosts that share a model hold different copies of its checkpoint",
    "manifest-mismatch": "a tensor or side file is not that of the manifest it is held against",
    "odd-scale": "a tensor is all zero or far larger or smaller than the same tensor of other layers",
    "equal-layers": "a layer or expert holds the bytes of another",
    "not-finite": "a tensor holds NaN or infinity",
    "trailing-bytes": "a shard is longer than its header says",
    "header-too-large": "a header exceeds the limit on its size",
    "header-invalid": "a header is not valid: JSON, offsets, overlap, gaps or sizes",
    "not-safetensors": "the file is not a safetensors file",
    "unsafe-file": "a file that could run code, or a path that leaves the directory",
    "not-found": "a path, file or name that does not exist",
    "missing-side-file": "a file beside the weights (tokenizer, processor, template, config) is missing",
    "side-file-invalid": "a file beside the weights cannot be read",
    "tokenizer-class": "a tokenizer class changes what tokenizer.json says, or is not known",
    "class-default": "a constant of the processor comes from its class, not from a file",
    "generation-default": "generation_config.json asks for a way of choosing tokens that answers here do without",
    "control-token": "a prompt spells a control token",
    # account of tensors and parameters
    "missing-tensor": "a parameter has no tensor to come from",
    "unconsumed-tensor": "a tensor that no parameter consumes",
    "shape-mismatch": "a tensor's shape is not the parameter's",
    "dtype-mismatch": "a tensor's dtype cannot serve the parameter",
    "unpaired-scale": "a quantized tensor without its scale, or a scale without its tensor",
    "tied-head": "the output head comes from the embedding",
    "conflicting-flag": "configuration and checkpoint contradict each other",
    "padded-tensor": "a tensor is larger than needed; the tail must be zero",
    # architecture
    "unknown-architecture": "no family recognises the configuration",
    "unsupported-block": "a configuration key asks for mathematics that no block has",
    "unsupported-format": "a storage format that cannot be read",
    "config-invalid": "a configuration key is missing or has an impossible value",
    "unread-config-key": "a configuration key that nothing reads",
    "filled-in": "figures rest on values that the published copy of a configuration lacks",
    "no-positions": "the model has no positional encoding",
    "remote-code": "the checkpoint brings code; it was not run",
    "fallback": "no family is native to the architecture: the reference's own modules compute, on one rank",
    # plans
    "indivisible": "a size does not divide by an axis of the mesh",
    "cut-block": "a shard ends inside a quantization block",
    "unpacked-weights": "quantized weights take more memory here than in the checkpoint",
    "does-not-fit": "the plan needs more memory than the devices have",
    "unsupported-axis": "an axis of the mesh that this model or build cannot use",
    "unknown-device": "a device that the hardware facts do not list",
    # inputs and requests
    "bad-image": "a picture that cannot be used",
    "bad-request": "a request that cannot be served",
    "bad-golden": "a golden file that cannot be used",
    "context-too-long": "a request needs more tokens than the context holds",
    "usage": "the command line or a configuration file is wrong",
    "odd-answers": "answers are empty, loops or gibberish",
    "config-changed": "config.json differs from that of the run that this one was begun from",
    "events-lost": "events could not be written into the run directory",
    "regression": "a figure is much worse than in the run that this one was begun from",
    "wrong-numbers": "a block computes something else than the reference",
    # running
    "rank-lost": "a rank died or stopped answering",
    "engine-failed": "the engine did not start or failed",
    "earlier-rung-failed": "a rung of the ladder below failed",
    "not-available": "a part that this machine or build does not have",
    "interrupted": "a verb was interrupted before it was over",
    "internal-fault": "a fault of Firstlight itself",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: what, how bad, where, expected against found, and the next action.

    `code` is one of `CODES`. `tensors` lists the tensors concerned (renderers shorten); of very many these are the
    first `MOST_TENSORS`, and `more_tensors` counts the others.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensors: tuple[str, ...] = ()
    expected: str | None = None
    found: str | None = None
    next: str | None = None
    more_tensors: int = 0

    def __post_init__(self) -> None:
        assert self.code in CODES, f"finding code {self.code!r} is not listed in CODES"

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.file:
            parts.append(f"file: {self.file}")
        if self.tensors:
            shown = ", ".join(self.tensors[:4])
            left = len(self.tensors) - 4 + self.more_tensors
            more = f" and {left:,} more" if left > 0 else ""
            parts.append(f"tensors: {shown}{more}")
        if self.expected is not None or self.found is not None:
            pair = (("expected", self.expected), ("found", self.found))
            parts.append("; ".join(f"{name}: {value}" for name, value in pair if value is not None))
        if self.next:
            parts.append(f"next: {self.next}")
        return "\n  ".join(map(printable, parts))


def listing(names: Sequence[str]) -> dict[str, Any]:
    """The fields of a finding that list tensors: the first `MOST_TENSORS` of the names, and how many more there are."""
    return {"tensors": tuple(names[:MOST_TENSORS]), "more_tensors": max(0, len(names) - MOST_TENSORS)}


def named(names: Sequence[str]) -> dict[str, Any]:
    """The same fields; names that exist already, as a list or tuple, are not shortened."""
    return {"tensors": tuple(names)} if isinstance(names, list | tuple) else listing(names)


def gathered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, with the same fault in very many files shortened to `MOST_FILES` findings and one for the rest.

    None names more than `MOST_TENSORS`.
    """
    alike: dict[object, list[Finding]] = {}
    for place, finding in enumerate(map(_bounded, findings)):
        is_of_file = bool(finding.file) and str(finding.file) in finding.message
        key = finding.severity, finding.code, _OWN.sub("", finding.message)
        alike.setdefault(key if is_of_file else place, []).append(finding)
    return tuple(one for group in alike.values() for one in (*group[:MOST_FILES], *_likewise(group[MOST_FILES:])))


def _bounded(finding: Finding) -> Finding:
    more = len(finding.tensors) - MOST_TENSORS
    if more <= 0:
        return finding
    return msgspec.structs.replace(
        finding, tensors=finding.tensors[:MOST_TENSORS], more_tensors=finding.more_tensors + more
    )


def _likewise(rest: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for many with the same fault; `found` lists what differs between them."""
    if len(rest) < 2:
        yield from rest
        return
    first = rest[0]
    are_one = len({str(one.expected).replace(str(one.file), "") for one in rest}) == 1
    told: dict[str, list[str]] = {}
    for one in rest[:MOST_TENSORS]:
        found = str(one.found) if are_one else f"{one.found}, not {one.expected}"
        told.setdefault(found.replace(str(one.file), "itself"), []).append(str(one.file))
    named = listing([name for one in rest for name in one.tensors])
    yield msgspec.structs.replace(
        first,
        message=f"the same of {len(rest):,} files more, {first.file} to {rest[-1].file}: {first.message}",
        expected=first.expected,
        found="; ".join(f"{', '.join(files)}: {what}" for what, files in told.items()),
        next=f"{first.next}; so for each of the others",
        tensors=named["tensors"],
        more_tensors=named["more_tensors"] + sum(one.more_tensors for one in rest),
    )


def several(count: int, one: str, many: str) -> str:
    """A count with the words that go with it: `1 tensor is`, `2 tensors are`."""
    return f"{count:,} {one if count == 1 else many}"


def printable(text: str) -> str:
    """`text` with control and bidirectional characters escaped, except line ends; for names that come from files."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def is_text(text: str) -> bool:
    """Whether a name can be encoded as UTF-8; names in a file system may hold arbitrary bytes."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def what_is(path: str | os.PathLike[str]) -> str:
    """What is at a path, in words: a directory, a file, something else, nothing, or why it is unknown."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if Path(path).is_symlink() else "nothing of that name"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError:
        return "a name that no file can have"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "a device, a pipe or a socket"


def fatal(code: str, message: str, **fields: object) -> Finding:
    """A fatal finding: nothing may go on."""
    return msgspec.convert({"code": code, "severity": "fatal", "message": message, **fields}, Finding)


def warning(code: str, message: str, **fields: object) -> Finding:
    """A warning: to be looked at, but nothing stops."""
    return msgspec.convert({"code": code, "severity": "warning", "message": message, **fields}, Finding)


def note(code: str, message: str, **fields: object) -> Finding:
    """A note: worth knowing."""
    return msgspec.convert({"code": code, "severity": "note", "message": message, **fields}, Finding)
