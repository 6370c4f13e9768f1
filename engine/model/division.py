"""Divides the tokens of a step over ranks: each computes its own rows, and attention sees the keys of all.

A query needs the keys in front of it only, so a rank's rows are a batch of their own: pieces of sequences that end
earlier. Keys and values are gathered over the ranks and written to every rank's cache, which is whole, so that decode
goes on undivided. Exact: no sum is taken in another order but those over ranks that there are anyway.

Legend: T tokens of the step, t those of this rank, N picture features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.engine.model.batch import Embedding, ForwardBatch, Tap
from firstlight.engine.parallel.comm import Comm
from firstlight.kernels.attention.meta import AttentionMeta


@dataclass(frozen=True, slots=True)
class Division:
    """How the rows of a step are divided: rank i of `comm` has rows [bounds[i], bounds[i + 1]).

    `whole`: cache locations of all tokens of the step. `over_experts`: ranks of ep have different rows.
    """

    comm: Comm
    bounds: tuple[int, ...]
    whole: AttentionMeta
    over_experts: bool

    @property
    def own(self) -> slice:
        return slice(self.bounds[self.comm.index], self.bounds[self.comm.index + 1])

    def gather(self, own: Tensor) -> Tensor:
        """Rows of all ranks in the order of the step: [t, ...] -> [T, ...]."""
        counts = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        widest = max(counts)
        if own.shape[0] < widest:
            own = torch.cat((own, own.new_zeros(widest - own.shape[0], *own.shape[1:])))
        joined = self.comm.all_gather(own, 0)
        if min(counts) == widest:
            return joined
        return torch.cat([part[:count] for part, count in zip(joined.split(widest), counts, strict=True)])

    def tap(self, tap: Tap) -> Tap:
        """A tap that receives the rows of all ranks; taps that only record names and times are unchanged."""
        if getattr(tap, "only_names", False):
            return tap
        return lambda name, value: tap(name, self.gather(value))


def divided(batch: ForwardBatch, comm: Comm, over_experts: bool) -> ForwardBatch:
    """This rank's rows as a batch; the logits' rows stay those of the whole step, see `whole_rows`."""
    total = batch.token_ids_T.shape[0]
    bounds = tuple(total * i // comm.size for i in range(comm.size + 1))
    division = Division(comm, bounds, batch.attention, over_experts)
    own = division.own
    pieces = _pieces(batch, own)
    whole = batch.attention
    rope_lens = batch.rope_lens or whole.kv_lens
    rows, deep = _pictures(batch, own)
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[own],
        positions_T=batch.positions_T[own],
        attention=AttentionMeta.build(
            [stop - start for _, start, stop in pieces],
            [whole.kv_lens[b] - whole.query_lens[b] + stop for b, _, stop in pieces],
            [whole.pages[b] for b, _, _ in pieces],
            whole.page_size,
            batch.token_ids_T.device,
        ),
        slots=tuple(batch.slots[b] for b, _, _ in pieces),
        positions_3T=None if batch.positions_3T is None else batch.positions_3T[:, own],
        picture_rows=rows,
        embeddings=tuple(_embeddings(batch.embeddings, own)),
        tap=None if batch.tap is None else division.tap(batch.tap),
        rope_lens=tuple(rope_lens[b] for b, _, _ in pieces),
        prompt_lens=None if batch.prompt_lens is None else tuple(batch.prompt_lens[b] for b, _, _ in pieces),
        rotary={},
        handed=deep,
        division=division,
    )


def own_rows(x_T: Tensor, batch: ForwardBatch) -> Tensor:
    """This rank's rows of a tensor over all tokens."""
    return x_T if batch.division is None else x_T[batch.division.own]


def whole_rows(x_t: Tensor, batch: ForwardBatch) -> Tensor:
    """A tensor over all tokens, from every rank's rows."""
    return x_t if batch.division is None else batch.division.gather(x_t)


def write_cache(
    k_tKD: Tensor, v_tKV: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, in_key: int | None = None
) -> None:
    """Writes keys and values of this step to the cache, including the rows of other ranks.

    `in_key`: the value is the first `in_key` dims of the key, so that only the key is sent.
    """
    if batch.division is None:
        batch.ops.write_cache(k_tKD, v_tKV, k_cache, v_cache, batch.attention)
        return
    heads = k_tKD.shape[1]
    sent = k_tKD.flatten(1) if in_key is not None else torch.cat((k_tKD.flatten(1), v_tKV.flatten(1)), dim=1)
    all_TF = batch.division.gather(sent)
    width = heads * k_tKD.shape[2]
    k_TKD = all_TF[:, :width].unflatten(1, (heads, -1)).contiguous()
    v_TKV = k_TKD[..., :in_key] if in_key is not None else all_TF[:, width:].unflatten(1, (heads, -1)).contiguous()
    batch.ops.write_cache(k_TKD, v_TKV, k_cache, v_cache, batch.division.whole)


def _pieces(batch: ForwardBatch, own: slice) -> list[tuple[int, int, int]]:
    """(sequence, first, last + 1 of its tokens in this step) of every sequence that has tokens among these rows."""
    pieces, start = [], 0
    for b, length in enumerate(batch.attention.query_lens):
        low, high = max(own.start, start), min(own.stop, start + length)
        if low < high:
            pieces.append((b, low - start, high - start))
        start += length
    return pieces


def _embeddings(embeddings: Sequence[Embedding], own: slice) -> list[Embedding]:
    """Picture features that fall on these rows."""
    found = []
    for one in embeddings:
        low, high = max(own.start, one.start), min(own.stop, one.start + one.features_NH.shape[0])
        if low < high:
            found.append(Embedding(low - own.start, one.features_NH[low - one.start : high - one.start]))
    return found


def _pictures(batch: ForwardBatch, own: slice) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The rows that pictures fill, counted from the first of these, and the features that are added behind layers."""
    if batch.picture_rows is None:
        return None, dict(batch.handed)
    mine = (batch.picture_rows >= own.start) & (batch.picture_rows < own.stop)
    handed = {name: value[mine] if name == "deep" else value for name, value in batch.handed.items()}
    return (batch.picture_rows[mine] - own.start if bool(mine.any()) else None), handed
