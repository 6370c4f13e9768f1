"""What was found wrong or worth knowing, as data; every code that can occur is listed here and nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import msgspec

Severity = Literal["fatal", "warning", "note"]

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

    `code` is one of `CODES`. `tensors` lists the tensors concerned (all of them; renderers shorten).
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensors: tuple[str, ...] = ()
    expected: str | None = None
    found: str | None = None
    next: str | None = None

    def __post_init__(self) -> None:
        assert self.code in CODES, f"finding code {self.code!r} is not listed in CODES"

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.file:
            parts.append(f"file: {self.file}")
        if self.tensors:
            shown = ", ".join(self.tensors[:4])
            more = f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else ""
            parts.append(f"tensors: {shown}{more}")
        if self.expected is not None or self.found is not None:
            pair = (("expected", self.expected), ("found", self.found))
            parts.append("; ".join(f"{name}: {value}" for name, value in pair if value is not None))
        if self.next:
            parts.append(f"next: {self.next}")
        return "\n  ".join(map(printable, parts))


def printable(text: str) -> str:
    """`text` with control and direction characters spelt out; line ends stay. For names that come from files."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: a name from a file system may hold bytes that are no text."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def what_is(path: str | os.PathLike[str]) -> str:
    """What lies at a path, in words: a directory, a file, something else, nothing, or why nobody can say."""
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
    """A finding that forbids going on."""
    return msgspec.convert({"code": code, "severity": "fatal", "message": message, **fields}, Finding)


def warning(code: str, message: str, **fields: object) -> Finding:
    """A finding to look at; going on is allowed."""
    return msgspec.convert({"code": code, "severity": "warning", "message": message, **fields}, Finding)


def note(code: str, message: str, **fields: object) -> Finding:
    """A finding worth knowing."""
    return msgspec.convert({"code": code, "severity": "note", "message": message, **fields}, Finding)
