"""From the plan of a step to the batch that the model computes: tensors, pages and the rows whose logits are wanted.

Legend: T tokens of all sequences flattened, N tokens of a picture, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firstlight.engine.model.batch import Embedding, ForwardBatch, Tap
from firstlight.engine.model.spec import Shape, Vision
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.serving.request import Arrays, Span
from firstlight.engine.serving.sight import Seen, Sight, extras, is_marked, with_grids
from firstlight.engine.serving.steps import Admission, Chunk, Draw
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.registry import Choice

Encode = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(slots=True)
class Held:
    """What a rank keeps of a running sequence.

    `slot` is the row of its states, `features_NH` are its pictures, from their first use to their last; `grids` are
    those of its pictures, one for each span, where the decoder's positions follow them. `prompt_tokens`: what the
    frequencies of all its chunks are stretched for, as if it came in one.
    """

    pages: tuple[int, ...]
    slot: int
    draw: Draw
    images: Arrays
    image_spans: tuple[Span, ...]
    features_NH: Tensor | None = field(default=None)
    grids: tuple[Shape, ...] = ()
    marked: bool = True
    prompt_tokens: int = 0

    @classmethod
    def of(cls, admission: Admission, slot: int, vision: Vision | None = None) -> Held:
        grids: tuple[Shape, ...] = ()
        spans, marked = admission.image_spans, True
        if vision is not None and admission.images:
            shapes = {name: array.numpy() for name, array in admission.images.items() if name != "pixel_values"}
            spans, grids = with_grids(vision, spans, shapes)
            marked = is_marked(shapes)
        return cls(
            pages=admission.pages,
            slot=slot,
            draw=admission.draw,
            images=admission.images,
            image_spans=spans,
            grids=grids,
            marked=marked,
            prompt_tokens=admission.prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every batch of a rank shares."""

    cache: tuple[tuple[Tensor, ...], ...]
    page_size: int
    comms: Comms
    ops: Choice
    device: torch.device
    sight: Sight = Sight()  # noqa: RUF009 - frozen


def build_batch(
    chunks: Sequence[Chunk], held: Mapping[int, Held], around: Surroundings, encode: Encode | None
) -> tuple[ForwardBatch, tuple[Chunk, ...]]:
    """The batch of these chunks, and the chunks whose next token is to be chosen, in the order of its logits' rows.

    `encode` turns the tensors of a sequence's pictures into features; None on ranks that do not embed tokens.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    ends = [chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]
    meta = AttentionMeta.build(
        lengths, ends, [held[chunk.number].pages for chunk in chunks], around.page_size, around.device
    )
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    chosen: list[Chunk] = []
    for chunk, end in zip(chunks, ends, strict=True):
        ids.extend(chunk.tokens)
        positions.extend(range(chunk.start, end))
        if chunk.draws >= 0:
            rows.append(len(ids) - 1)
            chosen.append(chunk)
    every_row = len(rows) == len(ids)
    batch = forward_batch(
        ids,
        positions,
        meta,
        around,
        [held[chunk.number].slot for chunk in chunks],
        logit_rows=None if every_row else torch.tensor(rows, dtype=torch.int64, device=around.device),
        embeddings=_embeddings(chunks, held, around.device, encode) if encode is not None else (),
        rope_lens=tuple(max(end, held[chunk.number].prompt_tokens) for chunk, end in zip(chunks, ends, strict=True)),
        seen=[
            Seen(chunk.start, end, one.image_spans, one.grids, one.marked)
            for chunk, end, one in zip(chunks, ends, [held[chunk.number] for chunk in chunks], strict=True)
        ],
    )
    return batch, tuple(chosen)


def forward_batch(
    ids: Sequence[int],
    positions: Sequence[int],
    meta: AttentionMeta,
    around: Surroundings,
    slots: Sequence[int],
    logit_rows: Tensor | None = None,
    embeddings: tuple[Embedding, ...] = (),
    tap: Tap | None = None,
    rope_lens: tuple[int, ...] | None = None,
    seen: Sequence[Seen] = (),
) -> ForwardBatch:
    """A batch of flattened tokens; `seen` says of each sequence what of its pictures is in it."""
    more = extras(around.sight, seen, around.device)
    handed = {}
    if more.picture_rows is not None and embeddings:
        features_NF = torch.cat([one.features_NH for one in embeddings])
        handed["deep"] = features_NF[:, features_NF.shape[1] // (1 + around.sight.deep) :]
    return ForwardBatch(
        token_ids_T=torch.tensor(ids, dtype=torch.int64, device=around.device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=around.device),
        attention=meta,
        cache=around.cache,
        comms=around.comms,
        ops=around.ops,
        slots=tuple(slots),
        logit_rows=logit_rows,
        positions_3T=more.positions_3T,
        picture_rows=more.picture_rows,
        groups=more.groups,
        embeddings=embeddings,
        tap=tap,
        rope_lens=rope_lens,
        handed=handed,
    )


def tensors_of(images: Arrays, device: torch.device) -> dict[str, Tensor]:
    """The processor's tensors of some pictures, on the device."""
    return {name: torch.from_numpy(array.numpy()).to(device) for name, array in images.items()}


def place_features(spans: Sequence[Span], start: int, stop: int, offset: int, features_NH: Tensor) -> list[Embedding]:
    """Rows of picture features that fall on positions [start, stop) of a sequence whose row `start` is row `offset`."""
    placed = []
    first = 0  # row of features_NH where the span's features begin
    for begin, count in spans:
        low, high = max(begin, start), min(begin + count, stop)
        if low < high:
            placed.append(Embedding(offset + low - start, features_NH[first + low - begin : first + high - begin]))
        first += count
    return placed


def _embeddings(
    chunks: Sequence[Chunk], held: Mapping[int, Held], device: torch.device, encode: Encode
) -> tuple[Embedding, ...]:
    placed: list[Embedding] = []
    offset = 0
    for chunk in chunks:
        sequence = held[chunk.number]
        if sequence.images and chunk.start >= _last(sequence.image_spans):  # the rest does not need them
            sequence.features_NH, sequence.images = None, {}
        if sequence.images:
            if sequence.features_NH is None:
                sequence.features_NH = encode(tensors_of(sequence.images, device))
            stop = chunk.start + len(chunk.tokens)
            placed += place_features(sequence.image_spans, chunk.start, stop, offset, sequence.features_NH)
        offset += len(chunk.tokens)
    return tuple(placed)


def _last(spans: Sequence[Span]) -> int:
    return max((start + count for start, count in spans), default=0)
