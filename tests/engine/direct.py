"""A model run by hand, without scheduler and host: the whole path from a directory to logits in one function.

Legend: B sequences, T real tokens of all of them flattened, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from firstlight.engine.model.batch import Embedding, ForwardBatch
from firstlight.engine.model.build import Model
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import CacheSpec, ModelSpec
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loader import Weights, load
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.registry import Choice, choose
from firstlight.workbench.golden import PICTURE_NAMES

Arrays = dict[str, NDArray[Any]]


class Direct:
    """One rank's part of a checkpoint in float32; weights of the roles `keep` stay packed where they can."""

    def __init__(
        self,
        path: Path,
        mesh: Mesh | None = None,
        rank: int = 0,
        comms: Comms | None = None,
        keep: Collection[str] = ("expert",),
    ) -> None:
        checkpoint = Checkpoint.open(str(path))
        self.spec, matcher = FAMILIES.describe(checkpoint.config)
        self.ledger = account(checkpoint, self.spec, matcher)
        self.ledger.refuse_if_incomplete()
        self.comms = comms or Comms.alone()
        self.weights: Weights = load(
            checkpoint, rank_pieces(self.spec, mesh or Mesh(), rank, "F32", self.ledger, keep_packed=keep)
        )
        self.ops: Choice = choose("cpu", torch.float32, {})
        self.model = Model(self.spec, self.weights, self.ops)

    def run(self, inputs: Arrays) -> Arrays:
        """What this rank sees of a forward over whole sequences: `hidden.i`, `logits`, `image_features`.

        Names as in golden files, arrays over flattened real tokens: [T, H] and [T, V].
        """
        ids, _ = flatten(inputs)
        found: Arrays = {}
        embeddings: tuple[Embedding, ...] = ()
        pictures = {name: torch.from_numpy(value) for name, value in inputs.items() if name in PICTURE_NAMES}
        if pictures and self.model.is_first:
            features_NH = self.model.encode_images(pictures)
            found["image_features"] = features_NH.numpy()
            embeddings = _place(self.spec, np.concatenate(ids), features_NH)
        width = inputs["input_ids"].shape[1]
        batch = self.batch([len(row) for row in ids], np.concatenate(ids), embeddings, found, width)
        logits_TV = self.model.forward(batch)
        if logits_TV is not None:
            found["logits"] = logits_TV.numpy()
        return found

    def batch(
        self,
        lengths: list[int],
        ids: NDArray[Any],
        embeddings: tuple[Embedding, ...] = (),
        found: Arrays | None = None,
        width: int | None = None,
    ) -> ForwardBatch:
        """Whole sequences of `lengths` over a fresh cache, one page a sequence; taps go to `found`."""
        longest, last = max(lengths), self.spec.num_layers

        def tap(name: str, value_TH: torch.Tensor) -> None:
            if found is not None and not name.endswith(".mixer"):
                key = {"embed": 0, "norm": last}.get(name)
                key = int(name.split(".")[1]) + 1 if key is None else key
                found[f"hidden.{key}"] = value_TH.float().numpy().copy()

        return ForwardBatch(
            token_ids_T=torch.from_numpy(ids),
            positions_T=torch.cat([torch.arange(length) for length in lengths]),
            attention=AttentionMeta.build(lengths, lengths, [[b] for b in range(len(lengths))], longest),
            cache=tuple(self.fresh(spec, len(lengths), longest) for spec in self.model.cache_specs),
            comms=self.comms,
            ops=self.ops,
            slots=tuple(range(len(lengths))),
            embeddings=embeddings,
            tap=tap,
            rope_lens=None if width is None else (width,) * len(lengths),
        )

    def fresh(self, spec: CacheSpec, pages: int, page_size: int) -> tuple[torch.Tensor, ...]:
        ranks = self.comms.heads.size
        paged = [
            torch.zeros(pages, one.local_heads(ranks), -(-page_size // one.every), one.dim) for one in spec.tensors
        ]
        return (*paged, *(torch.zeros(pages, *state.local_shape(ranks)) for state in spec.states))


def flatten(inputs: Arrays) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """The real tokens of each sequence, and where they stand: a bool array [batch, tokens]."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", np.ones_like(ids)).astype(bool)
    return [row[real] for row, real in zip(ids, mask, strict=True)], mask


def _place(spec: ModelSpec, ids_T: NDArray[Any], features_NH: torch.Tensor) -> tuple[Embedding, ...]:
    assert spec.vision is not None
    rows = np.flatnonzero(ids_T == spec.vision.image_token_id)
    return tuple(Embedding(int(row), features_NH[i : i + 1]) for i, row in enumerate(rows))
