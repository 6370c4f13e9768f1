"""A model of transformers behind the engine's interface: sequences in slots, traces, prompts with pictures.

Legend: B sequences, T tokens of all of them flattened, t tokens of one, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.engine.inputs.pictures import Picture
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import CacheSpec
from firstlight.engine.parallel.mesh import Coordinates
from firstlight.engine.parallel.pieces import RankPieces, Storage
from firstlight.engine.serving.trace import UNNORMED
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.loader import TORCH_DTYPES, Weights
from firstlight.engine.weights.memory import Pool
from firstlight.workbench.foreign_account import account_of, without_weights
from firstlight.workbench.reference import Reference
from firstlight.workbench.vendor_inputs import encoded, vendor_processor

ROLES = (  # of a parameter, by what its name holds; the first that fits
    ("expert", ("expert",)),
    ("vision", ("vision", "visual", "image")),
    ("projector", ("projector", "merger", "connector")),
    ("embedding", ("embed", "wte", "wpe")),
    ("head", ("lm_head", "output.weight")),
    ("norm", ("norm", "ln_")),
    ("attention", ("attn", "attention")),
)


@dataclass(slots=True)
class _Sequence:
    """What is kept of a running sequence; `cache` None: every step computes all of it again."""

    ids: list[int] = field(default_factory=list)
    images: Mapping[str, Tensor] = field(default_factory=dict)
    cache: Any = None


def load(
    checkpoint: Checkpoint, spec: ForeignSpec, dtype: str, device: torch.device, trust_remote_code: bool
) -> TransformersModel:
    """The checkpoint in transformers' own modules; raises `Refused` where its account is not complete."""
    started_s = time.perf_counter()
    ledger = account_of(checkpoint, without_weights(checkpoint.directory, trust_remote_code=trust_remote_code))
    ledger.refuse_if_incomplete()
    reference = Reference.open(checkpoint.directory, dtype=dtype, trust_remote_code=trust_remote_code)
    reference.model.to(device)
    weights = _weights(checkpoint, spec, reference.model, dtype, time.perf_counter() - started_s)
    return TransformersModel(checkpoint, spec, reference, ledger, weights, TORCH_DTYPES[dtype], device)


class TransformersModel:
    """See `ForeignModel`."""

    is_first = is_last = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ForeignSpec,
        reference: Reference,
        ledger: Ledger,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.ledger, self.weights, self.dtype, self.device = spec, ledger, weights, dtype, device
        self.layer_range = (0, spec.num_layers)
        self.cache_specs = (CacheSpec(),) * spec.num_layers  # the modules keep their own
        self._directory = checkpoint.directory
        self._reference = reference
        self._keeps = "cache" in inspect.signature(reference.model.forward).parameters and spec.vision is None
        self._awaited: dict[int, Mapping[str, Tensor]] = {}
        self._stores: dict[int, dict[int, _Sequence]] = {}  # by the cache of the engine that a batch is over
        self._processor: Any = None

    def admit(self, slot: int, images: Mapping[str, Tensor]) -> None:
        """See `ForeignModel.admit`."""
        self._awaited[slot] = images

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `ForeignModel.forward`; sequences are computed one after the other."""
        rows, start, meta = [], 0, batch.attention
        for b, length in enumerate(meta.query_lens):
            ids = batch.token_ids_T[start : start + length].tolist()
            sequence = self._sequence(batch, b, begins=meta.kv_lens[b] == length)
            rows.append(self._continued(sequence, ids))
            start += length
        logits_TV = torch.cat(rows)[:, : self.spec.vocab_size]
        return logits_TV if batch.logit_rows is None else logits_TV[batch.logit_rows]

    def trace(
        self, inputs: Mapping[str, NDArray[Any]], given: Mapping[str, NDArray[Any]], steps: int
    ) -> dict[str, NDArray[Any]]:
        """See `ForeignModel.trace`."""
        if not given:
            return self._reference.run(inputs, generate=steps)
        entered = {name for name in given if int(name.partition(".")[2]) < self.spec.num_layers}
        free = self._reference.run(inputs)
        found = self._reference.forced(inputs, {name: given.get(name, value) for name, value in free.items()})
        wanted = {f"hidden.{int(name.partition('.')[2]) + 1}" for name in entered}
        if f"hidden.{self.spec.num_layers}" in wanted:
            wanted.add(UNNORMED)
        return {name: value for name, value in found.items() if name in wanted}

    def prepare(
        self, prompt: str | Sequence[Mapping[str, Any]], pictures: Sequence[Picture], chat: bool
    ) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """See `ForeignModel.prepare`."""
        if self._processor is None:
            self._processor = vendor_processor(self._directory)
        _, ids, tensors = encoded(self._processor, prompt, pictures, chat)
        return ids, tensors

    def _sequence(self, batch: ForwardBatch, b: int, begins: bool) -> _Sequence:
        key = id(batch.cache)
        if key not in self._stores:  # a measurement beside serving: the one before it is done
            home = next(iter(self._stores), key)
            self._stores = {home: self._stores.get(home, {}), key: {}}
        store, slot = self._stores[key], batch.slots[b]
        if begins:
            is_home = key == next(iter(self._stores))
            store[slot] = _Sequence(images=self._awaited.pop(slot, {}) if is_home else {})
        return store[slot]

    def _continued(self, sequence: _Sequence, ids: list[int]) -> Tensor:
        """Logits [t, V] of the tokens that come on."""
        fresh = not sequence.ids
        sequence.ids.extend(ids)
        model = self._reference.model
        if self._keeps and not sequence.images and (fresh or sequence.cache is not None):
            out = model(input_ids=self._row(ids), cache=sequence.cache, use_cache=True)
            sequence.cache = getattr(out, "cache", None)
            return out.logits[0].float()
        tensors = self._reference.with_types({"input_ids": self._row(sequence.ids), **sequence.images})
        return model(**tensors, use_cache=False).logits[0, -len(ids) :].float()

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.device)


def _weights(checkpoint: Checkpoint, spec: ForeignSpec, model: Any, dtype: str, read_s: float) -> Weights:
    """The account of memory: every parameter and buffer of the modules, by role."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    names = {kind: name for name, kind in TORCH_DTYPES.items()}
    storages = tuple(
        Storage(name=name, shape=tuple(value.shape), dtype=names.get(value.dtype, dtype), role=_role(name), layer=0)
        for name, value in tensors.items()
        if value.dtype in names
    )
    pieces = RankPieces(
        rank=0,
        at=Coordinates(),
        layers=(0, spec.num_layers),
        storages=storages,
        pieces=(),
        tied_head=spec.tied_head,
        dtype=dtype,
    )
    return Weights(
        storages=tensors,
        params=tensors,
        pieces=pieces,
        bytes_read=checkpoint.payload_bytes,
        bytes_needed=checkpoint.payload_bytes,
        read_s=read_s,
        tied_head=spec.tied_head,
        origin=f"read by {spec.by}",
        pools=(Pool.reserve(0, "weights"),),
    )


def _role(name: str) -> str:
    lowered = name.lower()
    return next((role for role, words in ROLES if any(word in lowered for word in words)), "mlp")
