"""A batch through the model with its inner values shown: free running, or layer by layer on given inputs.

Legend: B rows of the batch, T padded length, L tokens of all rows flattened, H hidden, V vocabulary.
Names are those of golden files: hidden.0 is the decoder's input, hidden.i the output of layer i, the last one after
the final norm; unnormed, what the last layer gives in front of it; logits; image_features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.batch import Embedding, ForwardBatch
from firstlight.engine.model.build import Model
from firstlight.engine.model.foreign import ForeignModel
from firstlight.engine.model.spec import ModelSpec, pictures_of_rows
from firstlight.engine.model.spec.foreign import ForeignVision
from firstlight.engine.serving.batch import Surroundings, forward_batch, place_features, tensors_of
from firstlight.engine.serving.boot import Rank
from firstlight.engine.serving.request import Array, Arrays, Completion, Span
from firstlight.engine.serving.sight import Seen, Sight, is_marked, with_grids
from firstlight.kernels.attention.meta import AttentionMeta


class TraceCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to run.

    `input_ids` and `attention_mask` [B, T]; `images` under the vendor's names. `inputs` maps hidden.i to the input [B,
    T, H] of layer i (teacher forcing), empty for a free run. `layers` [first, last) limits what comes back (None: all;
    (0, 0): hidden.0 alone, for which no layer runs). `blocks`: also what each layer's mixer adds, as `layers.i.mixer`.
    `steps`: also a greedy continuation, of a foreign model that is given pictures. `positions` [B, T]: of the tokens,
    where they are not counted from 0. `prompts` [B]: so many tokens of each row are its prompt, and those behind choose
    keys as an answer's do, one by one.
    """

    input_ids: Array
    attention_mask: Array
    images: Arrays = {}
    inputs: Arrays = {}
    layers: tuple[int, int] | None = None
    blocks: bool = False
    steps: int = 0
    positions: Array | None = None
    prompts: tuple[int, ...] = ()


POSITIONS = "position_ids"
PROMPTS = "prompt_tokens"
NO_LAYER = (0, 0)
UNNORMED = "unnormed"


def trace_command(
    spec: ModelSpec,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    layers: tuple[int, int] | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    blocks: bool = False,
) -> TraceCommand:
    """Checks everything that could fail on a rank, so that no rank is left waiting; raises `Refused` (bad-golden)."""
    ids = np.asarray(input_ids)
    mask = _checked_mask(ids, attention_mask)
    placeholders = _checked_ids(spec, ids, mask)
    images = dict(tensors or {})
    positions = _checked_positions(ids, images.pop(POSITIONS, None))
    prompts = _checked_prompts(ids, images.pop(PROMPTS, None))
    check_images(spec, images, placeholders)
    if not placeholders and not isinstance(spec.vision, ForeignVision):
        images = {}  # tensors of no picture
    _check_layers(spec, ids, inputs or {}, layers)
    return TraceCommand(
        input_ids=Array.of(ids.astype(np.int64)),
        attention_mask=Array.of(mask),
        images={name: Array.of(np.asarray(value)) for name, value in images.items()},
        inputs={name: Array.of(np.asarray(value, dtype=np.float32)) for name, value in (inputs or {}).items()},
        layers=layers,
        blocks=blocks,
        positions=positions,
        prompts=prompts,
    )


def _checked_mask(ids: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    """The mask of `ids` as 0 and 1, int64 [B, T]: padding on one side of each row, and no row without a token."""
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise _bad("input_ids", "integers [batch, tokens]", f"{ids.dtype} {list(ids.shape)}")
    mask = np.ones_like(ids) if given is None else np.asarray(given)
    if mask.shape != ids.shape:
        raise _bad("attention_mask", str(list(ids.shape)), str(list(mask.shape)))
    mask = (mask != 0).astype(np.int64)
    if not mask.any(axis=1).all():
        raise _bad("attention_mask", "at least one token in every row", "an empty row")
    if (np.diff(mask, axis=1) != 0).sum(axis=1).max(initial=0) > 1:
        raise _bad("attention_mask", "padding on one side of each row", "holes")
    return mask


def _checked_ids(spec: ModelSpec, ids: np.ndarray, mask: np.ndarray) -> int:
    """How many placeholders of pictures there are; every other token is one of the vocabulary."""
    is_token = mask == 1
    is_picture = is_token & (ids == spec.vision.image_token_id) if spec.vision is not None else np.zeros_like(is_token)
    shown = ids[is_token & ~is_picture]
    if shown.size and not 0 <= shown.min() <= shown.max() < spec.vocab_size:
        raise _bad("input_ids", f"ids below {spec.vocab_size}", f"{shown.min()} to {shown.max()}")
    return int(is_picture.sum())


def _checked_positions(ids: np.ndarray, positions: np.ndarray | None) -> Array | None:
    if positions is None:
        return None
    if positions.shape != ids.shape or positions.dtype.kind not in "iu":
        raise _bad(POSITIONS, f"integers {list(ids.shape)}", f"{positions.dtype} {list(positions.shape)}")
    return Array.of(np.asarray(positions, dtype=np.int64))


def _checked_prompts(ids: np.ndarray, prompts: np.ndarray | None) -> tuple[int, ...]:
    if prompts is None:
        return ()
    if prompts.shape != ids.shape[:1] or prompts.dtype.kind not in "iu" or prompts.min() < 1:
        raise _bad(PROMPTS, f"integers {list(ids.shape[:1])} of one and more", f"{prompts.dtype} {list(prompts.shape)}")
    return tuple(int(one) for one in prompts)


def _check_layers(
    spec: ModelSpec, ids: np.ndarray, inputs: Mapping[str, np.ndarray], layers: tuple[int, int] | None
) -> None:
    """The inputs of layers that are forced, and the range of layers that is asked for."""
    for name, value in inputs.items():
        index = _index(name)
        width = spec.hidden_width(index or 0) or value.shape[-1]
        if index is None or index > spec.num_layers or value.shape != (*ids.shape, width):
            raise _bad(name, f"hidden.0 to hidden.{spec.num_layers}, {[*ids.shape, width]}", str(list(value.shape)))
    low, high = layers or (0, spec.num_layers)
    if (low, high) != NO_LAYER and not 0 <= low < high <= spec.num_layers:
        raise _bad("layers", f"a range within 0:{spec.num_layers}", f"{low}:{high}")


def check_images(spec: ModelSpec, images: Mapping[str, np.ndarray], placeholders: int) -> None:
    """Refuses (bad-image) tensors that the tower does not take, or a number of placeholders that they do not fill."""
    vision = spec.vision
    if isinstance(vision, ForeignVision):
        return
    if vision is None or not images:
        if images or placeholders:
            found = f"{len(images)} picture tensors, {placeholders} placeholder tokens"
            raise _bad_image("a model that sees and pictures for all placeholders", found)
        return
    problem = vision.problem(images)
    if problem is not None:
        raise _bad_image(*problem)
    counts = vision.counts(images)
    if sum(counts) != placeholders:
        raise _bad_image(f"{sum(counts)} placeholder tokens for {len(counts)} pictures", str(placeholders))


def run_trace(rank: Rank, command: TraceCommand) -> Arrays:
    """This rank's share of the outcome, float32 [L, ...] over its replica's rows; empty where another has the same."""
    if not isinstance(rank.model, Model):
        return _foreign(rank.model, command)
    at = rank.mesh.coordinates(rank.rank)
    speaks = at.tp == at.ep == at.sp == 0
    rows = _rows(command)[at.dp :: rank.mesh.dp]
    shown: dict[str, Tensor] = {}
    batch = _batch(rank, command, rows, shown) if rows else None
    if command.layers == NO_LAYER:
        if batch is not None and rank.model.is_first:
            shown["hidden.0"] = rank.model.embed(batch)
    elif batch is not None and command.inputs:
        _run_forced(rank, command, rows, batch, shown)
    elif batch is not None:
        logits = rank.model.forward(batch)
        if logits is not None:
            shown["logits"] = logits
    if not speaks:
        return {}
    return {name: Array.of(value.float().cpu().numpy()) for name, value in shown.items()}


def batch_of(rank: Rank, command: TraceCommand) -> ForwardBatch | None:
    """The batch that a command of this rank's replica is run as; None where it has no row of it."""
    rows = _rows(command)[rank.mesh.coordinates(rank.rank).dp :: rank.mesh.dp]
    return _batch(rank, command, rows, {}) if rows else None


def _foreign(model: ForeignModel, command: TraceCommand) -> Arrays:
    """The same of a model that shows itself."""
    mask = command.attention_mask.numpy()
    inputs = {"input_ids": command.input_ids.numpy(), "attention_mask": mask}
    pictures = {name: array.numpy() for name, array in command.images.items()}
    if command.positions is not None:
        inputs[POSITIONS] = command.positions.numpy()
    given = {name: array.numpy() for name, array in command.inputs.items()}
    found = model.trace(inputs | pictures, given, command.steps)
    low, high = command.layers or (0, model.spec.num_layers)
    shown = {}
    for name, value in found.items():
        index = model.spec.num_layers if name == UNNORMED else _index(name)
        if index is None or low <= index <= high:
            shown[name] = Array.of(value if name in ("image_features", "generated") else value[mask == 1])
    return shown


def assemble(command: TraceCommand, mesh_dp: int, shares: Sequence[tuple[int, Arrays]]) -> dict[str, np.ndarray]:
    """Rank 0: the shares of all ranks (with their replica) as padded arrays [B, T, ...]; zeros at padding."""
    rows = _rows(command)
    batch, length = command.input_ids.shape
    merged: dict[str, np.ndarray] = {}
    for replica, arrays in shares:
        for name, array in arrays.items():
            flat = array.numpy()
            if name in ("image_features", "generated"):
                merged.setdefault(name, flat)
                continue
            padded = merged.setdefault(name, np.zeros((batch, length, flat.shape[-1]), dtype=np.float32))
            start = 0
            for row in rows[replica::mesh_dp]:
                padded[row.index, row.first : row.first + len(row.ids)] = flat[start : start + len(row.ids)]
                start += len(row.ids)
    return merged


def generated(answers: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Answers of one length as arrays: `generated` [B, steps], the likeliest tokens of each step and their chances.

    `generated.likeliest` [B, steps, K] int64 and `generated.logprobs` [B, steps, K] float32, as they were served.
    """
    likeliest = [[one.top for one in answer.logprobs] for answer in answers]
    return {
        "generated": np.array([answer.tokens for answer in answers], dtype=np.int64),
        "generated.likeliest": np.array([[[id_ for id_, _ in top] for top in row] for row in likeliest], np.int64),
        "generated.logprobs": np.array([[[value for _, value in top] for top in row] for row in likeliest], np.float32),
    }


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the batch without its padding: `first` is the column of its first token."""

    index: int
    first: int
    ids: tuple[int, ...]


def _rows(command: TraceCommand) -> list[_Row]:
    ids, mask = command.input_ids.numpy(), command.attention_mask.numpy()
    return [
        _Row(index, int(np.argmax(row_mask)), tuple(int(id_) for id_ in row_ids[row_mask == 1]))
        for index, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True))
    ]


def _batch(rank: Rank, command: TraceCommand, rows: Sequence[_Row], shown: dict[str, Tensor]) -> ForwardBatch:
    """A prefill of these rows over a cache of its own, with taps that write into `shown`."""
    lengths = [len(row.ids) for row in rows]
    page_size = max(lengths) if rank.device.type == "cpu" else rank.limits.page_size
    per_row = -(-max(lengths) // page_size)
    pages = [tuple(range(row * per_row, (row + 1) * per_row)) for row in range(len(rows))]
    cache = () if command.layers == NO_LAYER else rank.cache.small(len(rows) * per_row, page_size, len(rows))
    around = Surroundings(cache, page_size, rank.comms, rank.ops, rank.device, Sight.of(rank.spec))
    batch = forward_batch(
        [id_ for row in rows for id_ in row.ids],
        _positions(command, rows),
        AttentionMeta.build(lengths, lengths, pages, page_size, rank.device),
        around,
        range(len(rows)),
        embeddings=_embeddings(rank, command, rows, shown),
        tap=_tap(rank, command, shown),
        rope_lens=(_stretched_for(command),) * len(rows),
        seen=_seen(rank, command, rows),
    )
    if not command.prompts:
        return batch
    return replace(batch, prompt_lens=tuple(command.prompts[row.index] for row in rows))


def _stretched_for(command: TraceCommand) -> int:
    """The length that frequencies are stretched for: a padded batch's, or up to the last position, as references do."""
    length = command.input_ids.shape[1]
    return length if command.positions is None else max(length, int(command.positions.numpy().max()) + 1)


def _positions(command: TraceCommand, rows: Sequence[_Row]) -> list[int]:
    """The position of each token: its place in its row, unless positions are given."""
    if command.positions is None:
        return [position for row in rows for position in range(len(row.ids))]
    given = command.positions.numpy()
    return [int(one) for row in rows for one in given[row.index, row.first : row.first + len(row.ids)]]


def _seen(rank: Rank, command: TraceCommand, rows: Sequence[_Row]) -> list[Seen]:
    """What of the pictures is in each of these rows."""
    vision = rank.spec.vision
    if vision is None or not command.images:
        return []
    tensors = {name: array.numpy() for name, array in command.images.items()}
    placeholders = {row.index: row.ids.count(vision.image_token_id) for row in _rows(command)}
    shares = pictures_of_rows(vision.counts(tensors), list(placeholders.values()))
    found = []
    for row in rows:
        first, count = shares[row.index]
        own = vision.share(tensors, first, count) if count else {}
        spans, grids = with_grids(vision, spans_of(row.ids, vision.image_token_id), own) if own else ((), ())
        found.append(Seen(0, len(row.ids), spans, grids, is_marked(tensors)))
    return found


def _embeddings(
    rank: Rank, command: TraceCommand, rows: Sequence[_Row], shown: dict[str, Tensor]
) -> tuple[Embedding, ...]:
    """Picture features at the placeholders of these rows; all pictures are encoded, in the order of the whole batch."""
    vision = rank.spec.vision
    if vision is None or not command.images or not rank.model.is_first:
        return ()
    assert isinstance(rank.model, Model)
    features_NH = rank.model.encode_images(tensors_of(command.images, rank.device))
    shown["image_features"] = features_NH[:, : rank.spec.hidden]
    before, first = {}, 0
    for row in _rows(command):
        before[row.index] = first
        first += row.ids.count(vision.image_token_id)
    placed: list[Embedding] = []
    offset = 0
    for row in rows:
        spans = spans_of(row.ids, vision.image_token_id)
        placed += place_features(spans, 0, len(row.ids), offset, features_NH[before[row.index] :])
        offset += len(row.ids)
    return tuple(placed)


def spans_of(ids: Sequence[int], image_token_id: int) -> tuple[Span, ...]:
    """Runs of placeholder tokens: (start, count) each."""
    spans: list[Span] = []
    for position, id_ in enumerate(ids):
        if id_ != image_token_id:
            continue
        if spans and sum(spans[-1]) == position:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((position, 1))
    return tuple(spans)


class _Tap:
    """Keeps what the taps show under the names of golden files."""

    def __init__(self, num_layers: int, layers: tuple[int, int], blocks: bool, shown: dict[str, Tensor]) -> None:
        self._num_layers = num_layers
        self._layers = layers
        self._blocks = blocks
        self._shown = shown

    def __call__(self, name: str, value: Tensor) -> None:
        kind, _, rest = name.partition(".")
        low, high = self._layers
        if kind == "embed" and low == 0:
            self._keep("hidden.0", value)
        elif kind == "norm" and high == self._num_layers:
            self._keep(f"hidden.{self._num_layers}", value)
        elif kind == "layers":
            index = int(rest.partition(".")[0])
            if not rest.isdecimal():
                if self._blocks and low <= index < high:
                    self._keep(name, value)
            elif low <= index + 1 <= high:
                self._keep(f"hidden.{index + 1}" if index + 1 < self._num_layers else UNNORMED, value)

    def _keep(self, name: str, value: Tensor) -> None:
        self._shown[name] = value.to(torch.float32, copy=True)


def _tap(rank: Rank, command: TraceCommand, shown: dict[str, Tensor]) -> _Tap:
    layers = command.layers or (0, rank.spec.num_layers)
    return _Tap(rank.spec.num_layers, layers, command.blocks, shown)


def _run_forced(
    rank: Rank, command: TraceCommand, rows: Sequence[_Row], batch: ForwardBatch, shown: dict[str, Tensor]
) -> None:
    """Each layer held here on its own given input; the head on the given last hidden state."""
    assert isinstance(rank.model, Model)
    low, high = command.layers or (0, rank.spec.num_layers)
    forced: dict[str, Tensor] = {}
    if rank.spec.shares_choices:  # a layer may need what one on another stage, or one that is not asked for, chose
        rank.model.forward(replace(batch, tap=None))
    rank.model.hand_on(batch)
    for index in range(max(low, rank.model.layer_range[0]), min(high, rank.model.layer_range[1])):
        given = _entering(rank, command, rows, index)
        if given is not None:
            forced[f"hidden.{index + 1}"] = rank.model.run_layer(index, given, batch)
    last = command.inputs.get(f"hidden.{rank.spec.num_layers}")
    if last is not None and rank.model.is_last and high == rank.spec.num_layers:
        forced["logits"] = rank.model.run_head(_flatten(last, rows, rank), batch)
    beside = ("image_features", *([UNNORMED] if f"hidden.{rank.spec.num_layers}" in forced else []))
    kept = {name: value for name, value in shown.items() if name.startswith("layers.") or name in beside}
    shown.clear()
    shown.update(kept | forced)


def _entering(rank: Rank, command: TraceCommand, rows: Sequence[_Row], index: int) -> Tensor | None:
    """What enters a layer by the given hidden states: one stream [L, H], or planes [L, P, H]; None if not all are."""
    residual = rank.spec.residual
    sources = (index,) if residual is None else residual.sources(index)
    given = [command.inputs.get(f"hidden.{source}") for source in sources or ()]
    found = [_flatten(one, rows, rank) for one in given if one is not None]
    if not found or len(found) < len(given):
        return None
    if residual is None:
        return found[0]
    planes_LPH = torch.stack(found, dim=1).reshape(len(found[0]), -1, rank.spec.hidden)
    return planes_LPH.expand(-1, residual.planes(index), -1)  # the embedding is every plane


def _flatten(given: Array, rows: Sequence[_Row], rank: Rank) -> Tensor:
    padded = given.numpy()
    flat = np.concatenate([padded[row.index, row.first : row.first + len(row.ids)] for row in rows])
    return torch.from_numpy(flat).to(rank.device)


def _index(name: str) -> int | None:
    kind, _, number = name.partition(".")
    return int(number) if kind == "hidden" and number.isdecimal() else None


def _bad(name: str, expected: str, found: str) -> Refused:
    message = f"{name} cannot be run"
    return Refused(
        fatal("bad-golden", message, tensors=(name,), expected=expected, found=found, next=f"correct {name}")
    )


def _bad_image(expected: str, found: str) -> Refused:
    return Refused(
        fatal(
            "bad-image",
            "the picture tensors do not fit the model or the prompt",
            expected=expected,
            found=found,
            next="preprocess prompt and pictures together with the checkpoint's own processor",
        )
    )
