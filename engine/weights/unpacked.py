"""A checkpoint's weights unpacked to whole tensors, by the names that rules and references use.

For references, which compute with what the tensors stand for: by headers and the raw configuration (`recipes`), and by
the published formulas (`published`). A rank's own loading reads options, finds what belongs together, cuts slices and
unpacks them in its own way (`formats`, `packed`, `loader`), so that no fault of it is theirs as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.files.index import CONFIG_LIMIT_BYTES, read_object
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.packed import left_out
from firstlight.engine.weights.published import published
from firstlight.engine.weights.recipes import Recipe, recipes, said

LEVELS = ("text_config", "language_config", "llm_config", "thinker_config")
BESIDE = "hf_quant_config.json"
OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")


class Unpacked:
    """Names and values. Nothing is read before it is asked for. Rows behind `vocab_size` are left out."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises `Refused` where headers do not tell how codes and scales make weights."""
        self._checkpoint = checkpoint
        beside = None
        if BESIDE in checkpoint.side_files:
            beside, _ = read_object(Path(checkpoint.directory), BESIDE, CONFIG_LIMIT_BYTES)
        told = said(checkpoint.config, beside)
        self._packed: Mapping[str, Recipe] = recipes(checkpoint.tensors, told, self._numbers)
        texts = (checkpoint.config, *(checkpoint.config.get(level) for level in LEVELS))
        sizes = (text.get("vocab_size") for text in texts if isinstance(text, Mapping))
        self._vocabulary = next((size for size in sizes if isinstance(size, int)), None)
        parts = {info.name for recipe in self._packed.values() for info in recipe.tensors.values()}
        plain = (name for name in checkpoint.tensors if name not in parts)
        self.names = (*(name for name in plain if not told.options or left_out(name) is None), *self._packed)

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
        recipe = self._packed.get(name)
        if recipe is None:
            stored = self._stored(self._checkpoint.tensors[name])
            return stored[: self._rows(name)] if stored.dim() else stored
        return self.read_by(name, recipe)

    @property
    def packed(self) -> tuple[str, ...]:
        """The names of the weights that lie in several tensors."""
        return tuple(self._packed)

    def recipe(self, name: str) -> Recipe:
        """How one of them is read. `KeyError`: it is no such weight."""
        return self._packed[name]

    def read_by(self, name: str, recipe: Recipe) -> Tensor:
        """A weight read in this way, float32. Raises `Refused` where its parts do not fit each other."""
        by_role = {role: self._stored(info) for role, info in recipe.tensors.items()}
        recipe = _fitted(name, recipe, by_role)
        values = published(recipe, by_role)
        return values.mT.contiguous() if recipe.turned else values

    def _numbers(self, info: TensorInfo) -> list[int]:
        """The whole numbers of a small tensor."""
        found: list[int] = self._stored(info).flatten().tolist()
        return found

    def _stored(self, info: TensorInfo) -> Tensor:
        if not info.nbytes:
            return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
        raw = bytearray(self._checkpoint.read_bytes(info.name))
        return torch.frombuffer(raw, dtype=STORED_DTYPES[info.dtype]).view(info.shape)


def _fitted(name: str, recipe: Recipe, stored: Mapping[str, Tensor]) -> Recipe:
    """The recipe with its true columns, where headers show whole words only. Raises `Refused` if parts do not fit."""
    told = stored["shape"].tolist() if "shape" in stored else list(recipe.shape)
    words = 32 // recipe.bits
    if told[:-1] != list(recipe.shape[:-1]) or not 0 <= recipe.shape[-1] - told[-1] < words:
        raise _misfit(name, recipe, "shape", str(list(recipe.shape)), str(told))
    order = stored.get("order")
    if order is not None and order.numel():  # where inputs have an order, scales have groups; else one may be all
        groups = stored["scale"].shape
        last = groups[-2] if recipe.formula == "inputs" else groups[-1]
        if not 0 <= int(order.min()) <= int(order.max()) < last:
            raise _misfit(name, recipe, "order", f"groups below {last}", f"{int(order.min())} to {int(order.max())}")
    return recipe._replace(shape=tuple(told))


def _misfit(name: str, recipe: Recipe, role: str, expected: str, found: str) -> Refused:
    info = recipe.tensors[role]
    return Refused(
        fatal(
            "shape-mismatch",
            f"{info.name} does not fit the weight {name} {list(recipe.shape)}",
            file=info.file,
            tensors=(info.name, recipe.tensors["codes"].name),
            expected=expected,
            found=found,
            next="fetch the file again: a weight and what says how to unpack it belong to different releases",
        )
    )
