"""A checkpoint's weights by the names that rules and references know them by, whole and unpacked.

For references, which compute with what the tensors stand for; a rank's own loading reads slices (`loader`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats.grid import Packed
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.ledger import scheme_of
from firstlight.engine.weights.packed import group, left_out, with_columns
from firstlight.engine.weights.placing import STORED_DTYPES, refuse_if_wrong


class Unpacked:
    """Names and values. Nothing is read before it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises `Refused` where codes and scales do not make whole weights."""
        self._checkpoint = checkpoint
        scheme, findings = scheme_of(checkpoint)
        grouped = group(checkpoint.tensors, scheme)
        broken = [finding for finding in (*findings, *grouped.findings) if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)
        self._packed: Mapping[str, Packed] = {packed.name: packed for packed in grouped.weights.values()}
        parts = grouped.companions | grouped.weights.keys()
        plain = (name for name in checkpoint.tensors if name not in parts)
        self.names = (*(name for name in plain if not scheme.method or left_out(name) is None), *self._packed)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight lies in several tensors."""
        return bool(self._packed)

    @property
    def elements(self) -> int:
        """Of all weights together."""
        shapes = (self._packed[n].shape if n in self._packed else self._checkpoint.tensors[n].shape for n in self.names)
        return sum(map(math.prod, shapes))

    def read(self, name: str) -> Tensor:
        """A weight in the dims that rules speak of: float32 where it is unpacked, else as stored."""
        packed = self._packed.get(name)
        if packed is None:
            return self._stored(self._checkpoint.tensors[name])
        parts = zip(packed.format.parts, packed.tensors, strict=True)
        stored = {part.role: self._stored(info) for part, info in parts}
        if "shape" in stored:  # headers show whole words only
            packed = with_columns(packed, int(stored["shape"][-1])) or packed
        refuse_if_wrong(packed, stored)
        values = packed.format.unpack(stored, tuple((0, size) for size in packed.shape), packed.shape)
        return values.mT.contiguous() if packed.format.swapped else values

    def _stored(self, info: TensorInfo) -> Tensor:
        if not info.nbytes:
            return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
        raw = bytearray(self._checkpoint.read_bytes(info.name))
        return torch.frombuffer(raw, dtype=STORED_DTYPES[info.dtype]).view(info.shape)
