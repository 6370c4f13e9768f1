"""A checkpoint's weights unpacked to whole tensors, by the names that rules and references use.

For references, which compute with what the tensors stand for, by the published formulas (`published`). A rank's own
loading reads slices and unpacks them in its own way (`loader`, `formats`), so that no fault of it is theirs as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.formats.announced import LEVELS
from firstlight.engine.weights.formats.grid import Packed
from firstlight.engine.weights.ledger import scheme_of
from firstlight.engine.weights.loading.placing import STORED_DTYPES, refuse_if_wrong
from firstlight.engine.weights.packed import group, left_out, with_columns
from firstlight.engine.weights.published import published

OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")


class Unpacked:
    """Names and values. Nothing is read before it is asked for. Rows behind `vocab_size` are left out."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises `Refused` where codes and scales do not make whole weights."""
        self._checkpoint = checkpoint
        scheme, findings = scheme_of(checkpoint)
        grouped = group(checkpoint.tensors, scheme)
        broken = [finding for finding in (*findings, *grouped.findings) if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)
        self._packed: Mapping[str, Packed] = {packed.name: packed for packed in grouped.weights.values()}
        texts = (checkpoint.config, *(checkpoint.config.get(level) for level in LEVELS))
        sizes = (text.get("vocab_size") for text in texts if isinstance(text, Mapping))
        self._vocabulary = next((size for size in sizes if isinstance(size, int)), None)
        parts = grouped.companions | grouped.weights.keys()
        plain = (name for name in checkpoint.tensors if name not in parts)
        self.names = (*(name for name in plain if not scheme.method or left_out(name) is None), *self._packed)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight lies in several tensors."""
        return bool(self._packed)

    @property
    def is_padded(self) -> bool:
        """Whether rows behind the vocabulary are stored."""
        tensors = self._checkpoint.tensors
        return any(self._rows(n) < tensors[n].shape[0] for n in self.names if n in tensors and tensors[n].shape)

    def _rows(self, name: str) -> int:
        """How many rows of a stored tensor are read."""
        rows = self._checkpoint.tensors[name].shape[0]
        is_cut = self._vocabulary is not None and name.endswith(OF_VOCABULARY)
        return min(rows, self._vocabulary) if is_cut and self._vocabulary is not None else rows

    @property
    def elements(self) -> int:
        """Of all weights together."""
        shapes = (self._packed[n].shape if n in self._packed else self._checkpoint.tensors[n].shape for n in self.names)
        return sum(map(math.prod, shapes))

    def read(self, name: str) -> Tensor:
        """A weight in the dims that rules speak of: float32 where it is unpacked, else as stored."""
        packed = self._packed.get(name)
        if packed is None:
            stored = self._stored(self._checkpoint.tensors[name])
            return stored[: self._rows(name)] if stored.dim() else stored
        parts = zip(packed.format.parts, packed.tensors, strict=True)
        by_role = {part.role: self._stored(info) for part, info in parts}
        if "shape" in by_role:  # headers show whole words only
            packed = with_columns(packed, int(by_role["shape"][-1])) or packed
        refuse_if_wrong(packed, by_role)
        values = published(packed.format, by_role, packed.shape)
        return values.mT.contiguous() if packed.format.swapped else values

    def _stored(self, info: TensorInfo) -> Tensor:
        if not info.nbytes:
            return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
        raw = bytearray(self._checkpoint.read_bytes(info.name))
        return torch.frombuffer(raw, dtype=STORED_DTYPES[info.dtype]).view(info.shape)
