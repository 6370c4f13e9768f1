"""Which implementation of linear layers was fastest for a shape, kept on this machine from one start to the next.

Measuring takes a start a fifth of a second or more, and what is measured twice may be chosen differently: with the
record a restart computes the same bits. Another CPU, compiler, torch or source of the operators has another record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec
import torch

from firstlight.engine.parallel.comm import Comm
from firstlight.kernels.linear.measured import MeasuredLinear
from firstlight.kernels.native.build import fingerprint
from firstlight.kernels.native.library import cpu_lines
from firstlight.kernels.registry import Choice


class Choices:
    """The record for the chooser of an engine; nothing where linear layers are not chosen by measuring."""

    def __init__(self, ops: Choice, cache_dir: Path) -> None:
        self._linear = ops.linear if isinstance(ops.linear, MeasuredLinear) else None
        self._known: dict[str, str] = {}
        if self._linear is not None:
            self._file = cache_dir / f"linear-{_machine(self._linear.candidates)}.json"

    def recall(self) -> None:
        """Have shapes that were measured before prepared as they were then."""
        if self._linear is not None:
            self._known = _read(self._file, self._linear.candidates)
            self._linear.replay(self._known)

    def agree(self, control: Comm) -> bool:
        """Have all ranks choose as the first of them did; whether this one has to prepare its weights again.

        What several ranks compute alike, mixers that each has whole or routers, is the same to the last bit then: with
        other bits a router might choose other experts. Every rank must call it.
        """
        mine = {} if self._linear is None else self._linear.record()
        others = _gathered(mine, control) if control.size > 1 else []
        agreed = {shape: name for record in reversed(others) for shape, name in record.items()}
        changed = {shape: agreed[shape] for shape in mine if agreed.get(shape, mine[shape]) != mine[shape]}
        if self._linear is None or not changed:
            return False
        self._linear.replay({shape: name for shape, name in changed.items() if name in self._linear.candidates})
        return True

    def keep(self) -> None:
        """Write down what was measured since; a folder that cannot be written to keeps nothing."""
        if self._linear is None or self._linear.record().keys() <= self._known.keys():
            return
        record = {**self._linear.record(), **_read(self._file, self._linear.candidates)}  # who came first counts
        draft = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=2))
            draft.replace(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()


def _gathered(record: dict[str, str], control: Comm) -> list[dict[str, str]]:
    """The records of all ranks, in their order."""
    sent = torch.frombuffer(bytearray(msgspec.json.encode(record)), dtype=torch.uint8)
    sizes = control.all_gather(torch.tensor([len(sent)]), 0).tolist()
    padded = torch.nn.functional.pad(sent, (0, max(sizes) - len(sent)))
    rows = control.all_gather(padded.unsqueeze(0), 0)
    found = [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]
    return [msgspec.json.decode(one, type=dict[str, str]) for one in found]


def _read(file: Path, candidates: tuple[str, ...]) -> dict[str, str]:
    """What a file records, as far as it is possible here; nothing from a file that is not there or makes no sense."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {shape: name for shape, name in found.items() if name in candidates}


def _machine(candidates: tuple[str, ...]) -> str:
    """What times depend on besides the shape, as a hash."""
    of = fingerprint() if "native" in candidates else "\n".join(cpu_lines())
    words = [torch.__version__, torch.backends.cpu.get_cpu_capability(), *candidates, of]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
