"""Builds the model that a spec describes over a rank's weights. Legend: T tokens, R rows, H hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch, Tap
from firstlight.engine.model.division import divided, own_rows, whole_rows
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.embedding import Head, TokenEmbedding
from firstlight.engine.model.layers.layer import Layer
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.per_layer import PerLayerInputs
from firstlight.engine.model.layers.residual import ENDS
from firstlight.engine.model.layers.towers import TOWERS
from firstlight.engine.model.spec import CacheSpec, ModelSpec
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.rows import row_axes, undivided
from firstlight.engine.weights.loader import TORCH_DTYPES, Weights
from firstlight.engine.weights.loading.residency import Turning
from firstlight.kernels.registry import Choice


class Model:
    """The layers of one rank. `layer_range` [start, stop) are those of its pipeline stage, in global numbers."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Choice) -> None:
        access = Access(weights.storages, ops, cached=weights.experts, packings=weights.pieces.packings)
        start, stop = weights.pieces.layers
        self.spec = spec
        self._divides = not undivided(spec)
        self._num_deep = len(getattr(spec.vision, "deep", ()))
        self.layer_range = (start, stop)
        self.dtype = TORCH_DTYPES[weights.pieces.dtype]
        self.device = weights.device
        self.is_first, self.is_last = start == 0, stop == spec.num_layers
        self._embed = TokenEmbedding(spec, access) if self.is_first else None
        self._inputs = (
            PerLayerInputs(spec.per_layer, access.into("per_layer")) if spec.per_layer and self.is_first else None
        )
        self._make_vision = self._tower_over(weights, access) if spec.vision and self.is_first else None
        self._vision = None
        if self._make_vision is not None and (weights.stream is None or weights.stream.is_all_there):
            self._vision = self._make_vision()
        self._layers = self._layers_over(weights, ops)
        self._choosers = [spec.chooser(i) for i in range(start, stop)]
        self._ends = (
            ENDS[type(spec.residual)](spec.residual, access.into("residual"), self.is_last) if spec.residual else None
        )
        self._norm = Norm(spec.final_norm, access.into("norm")) if self.is_last else None
        self._head = Head(spec, access) if self.is_last else None

    def _tower_over(self, weights: Weights, access: Access) -> Callable[[], Callable[..., Tensor]]:
        """Makes the vision tower, of weights that may be the last to come: text alone does not wait for them."""

        def tower() -> Callable[..., Tensor]:
            assert self.spec.vision is not None
            late = {} if weights.stream is None else weights.stream.behind()
            whole = replace(access, storages={**access.storages, **late})
            return TOWERS[type(self.spec.vision)](self.spec.vision, whole)

        return tower

    def _layers_over(self, weights: Weights, ops: Choice) -> Sequence[Layer] | Turning[Layer]:
        """The layers, made once; where their weights come and go, made of what is there when it is their turn."""
        arriving = None if weights.stream is None else weights.stream.arriving

        def layer(storages: Mapping[str, Tensor], index: int) -> Layer:
            access = Access(storages, ops, f"layers.{index}.", weights.experts, weights.pieces.packings, arriving)
            return Layer(self.spec.layers[index], access, index)

        if weights.stream is not None:
            return weights.stream.layers(layer)
        return [layer(weights.storages, index) for index in range(*self.layer_range)]

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer of this stage keeps."""
        return tuple(self.spec.layers[i].cache() for i in range(*self.layer_range))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Logits [R, vocabulary] float32 for the rows asked for, on the last stage; None on the others."""
        part = self._part(batch)
        x_TH = self._embedded(part) if self.is_first else self._received(part)
        for index in range(*self.layer_range):
            x_TH = self._through(index, x_TH, part)
        if not self.is_last:
            self._send(x_TH, part)
            return None
        x_TH = self._deepened(self.spec.num_layers, x_TH, part)
        return self._logits(whole_rows(x_TH, part), batch)

    def _part(self, batch: ForwardBatch) -> ForwardBatch:
        """The rows of this rank, where a step is divided; all of them where tokens see others behind them."""
        comms, meta = batch.comms, batch.attention
        mesh = Mesh(ep=comms.ep.size, sp=comms.sp.size)
        if mesh.world_size == 1 or batch.groups is not None or not self._divides:
            return batch
        axes = row_axes(self.spec, mesh, comms.exchange, sum(meta.query_lens), meta.max_query_len > 1)
        if not axes:
            return batch
        return divided(batch, comms.rows if "ep" in axes else comms.sp, over_experts="ep" in axes)

    @torch.inference_mode()
    def encode_images(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Picture tensors under the vendor's names -> features [tokens, H] in order; ranks of the first stage only.

        Features that are added behind the first layers stand beside them: [tokens, (1 + deep) H].
        """
        assert self._make_vision is not None, "this rank holds no vision tower"
        if self._vision is None:
            self._vision = self._make_vision()
        return self._vision({name: tensor.to(self.device) for name, tensor in tensors.items()})

    @torch.inference_mode()
    def run_layer(self, index: int, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """Layer `index` alone on a given input (teacher forcing), [T, H] or the planes that enter it, [T, P, H].

        What comes back is what comparisons show of its output, [T, H]; of the last layer, behind the final norm.
        """
        shown: dict[str, Tensor] = {}
        part = self._part(replace(batch, tap=_both(batch.tap, shown)))
        x_TH = self._through(index, own_rows(x_TH.to(self.device, self.dtype), part), part)
        if self._norm is not None and index == self.spec.num_layers - 1:
            x_TH = whole_rows(self._deepened(index + 1, x_TH, part), part)
            return self._norm(x_TH if self._ends is None else self._ends.leave(x_TH))
        return shown[f"layers.{index}"]

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> Tensor:
        """The decoder's input [T, H] of a batch, for which no layer runs; first stage only."""
        assert self._embed is not None, "this rank holds no token embedding"
        return self._embed(batch)

    @torch.inference_mode()
    def hand_on(self, batch: ForwardBatch) -> None:
        """What `forward` would hand from stage to stage beside the stream, alone; before `run_layer` on a batch."""
        if not self.is_first:
            self._receive_inputs(batch)
            self._receive_deep(batch)
        elif self._inputs is not None and self._embed is not None:
            batch.handed["inputs"] = self._inputs(self._embed(batch), batch)
        if not self.is_last:
            self._send_inputs(batch)
            self._send_deep(batch)

    @torch.inference_mode()
    def run_head(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """The output head alone on given last hidden states [T, H], after the final norm; last stage only."""
        assert self._head is not None, "this rank holds no output head"
        return self._head(x_TH.to(self.device, self.dtype), batch)

    def _through(self, index: int, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """One layer, which finds the keys that its own indexer, or that of a layer in front of it, chose."""
        place, chooser = index - self.layer_range[0], self._choosers[index - self.layer_range[0]]
        x_TH = self._deepened(index, x_TH, batch)
        if chooser is not None and chooser != index:
            batch.handed["chosen"] = batch.handed[f"chosen.{chooser}"]
        if self.spec.per_layer is not None:
            batch.handed["input"] = batch.handed["inputs"][:, place]
        owner = self.spec.layers[index].keys_of
        keeps = place if owner is None else owner - self.layer_range[0]
        x_TH = self._layers[place](x_TH, batch, batch.cache[keeps])
        if chooser == index:
            batch.handed[f"chosen.{index}"] = batch.handed["chosen"]
        return x_TH

    def _deepened(self, index: int, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """What leaves layer `index - 1`, and the picture features that are added to it."""
        if not 0 < index <= self._num_deep or batch.picture_rows is None:
            return x_TH
        deep_NH = batch.handed["deep"][:, (index - 1) * x_TH.shape[1] : index * x_TH.shape[1]]
        return x_TH.index_add(0, batch.picture_rows, deep_NH.to(x_TH.dtype))

    def _receive_inputs(self, batch: ForwardBatch) -> None:
        if (inputs := self.spec.per_layer) is not None:
            shape = batch.token_ids_T.shape[0], inputs.layers - self.layer_range[0], inputs.width
            empty_TLP = torch.empty(shape, dtype=self.dtype, device=self.device)
            batch.handed["inputs"] = batch.comms.pp.receive(empty_TLP, batch.comms.pp.index - 1)

    def _send_inputs(self, batch: ForwardBatch) -> None:
        if self.spec.per_layer is not None:
            rest_TLP = batch.handed["inputs"][:, self.layer_range[1] - self.layer_range[0] :]
            batch.comms.pp.send(rest_TLP.to(self.dtype).contiguous(), batch.comms.pp.index + 1)

    def _receive_deep(self, batch: ForwardBatch) -> None:
        if self._num_deep >= self.layer_range[0] and batch.picture_rows is not None:
            shape = len(batch.picture_rows), self._num_deep * self.spec.hidden
            empty_NH = torch.empty(shape, dtype=self.dtype, device=self.device)
            batch.handed["deep"] = batch.comms.pp.receive(empty_NH, batch.comms.pp.index - 1)

    def _send_deep(self, batch: ForwardBatch) -> None:
        if self._num_deep >= self.layer_range[1] and batch.picture_rows is not None:
            batch.comms.pp.send(batch.handed["deep"].to(self.dtype).contiguous(), batch.comms.pp.index + 1)

    def _embedded(self, batch: ForwardBatch) -> Tensor:
        assert self._embed is not None
        x_TH = self._embed(batch)
        if batch.tap is not None:
            batch.tap("embed", x_TH)
        if self._inputs is not None:
            batch.handed["inputs"] = self._inputs(x_TH, batch)
        return x_TH if self._ends is None else self._ends.enter(x_TH)

    def _received(self, batch: ForwardBatch) -> Tensor:
        shape = (batch.token_ids_T.shape[0], *self.spec.stream_shape(self.layer_range[0]))
        empty_TH = torch.empty(shape, dtype=self.dtype, device=self.device)
        source = batch.comms.pp.index - 1
        if chosen := self.spec.chosen_keys(self.layer_range[0]):
            layer, keys = chosen
            empty_Tk = torch.empty(
                shape[0], min(keys, batch.attention.max_kv_len), dtype=torch.int64, device=self.device
            )
            batch.handed[f"chosen.{layer}"] = batch.comms.pp.receive(empty_Tk, source)
        self._receive_inputs(batch)
        self._receive_deep(batch)
        return batch.comms.pp.receive(empty_TH, source)

    def _send(self, x_TH: Tensor, batch: ForwardBatch) -> None:
        destination = batch.comms.pp.index + 1
        if chosen := self.spec.chosen_keys(self.layer_range[1]):
            batch.comms.pp.send(batch.handed[f"chosen.{chosen[0]}"], destination)
        self._send_inputs(batch)
        self._send_deep(batch)
        batch.comms.pp.send(x_TH, destination)

    def _logits(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        assert self._norm is not None
        assert self._head is not None
        if batch.logit_rows is not None:
            x_TH = x_TH[batch.logit_rows]
        x_TH = self._norm(x_TH if self._ends is None else self._ends.leave(x_TH))
        if batch.tap is not None:
            batch.tap("norm", x_TH)
        return self._head(x_TH, batch)


def _both(tap: Tap | None, shown: dict[str, Tensor]) -> Tap:
    """A tap that keeps what it is shown, and shows it to `tap` as well."""

    def keep(name: str, value: Tensor) -> None:
        shown[name] = value
        if tap is not None:
            tap(name, value)

    return keep
