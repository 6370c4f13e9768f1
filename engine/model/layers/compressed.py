"""Attention over a window and over compressed spans of everything before it (DeepSeek-V4).

Legend: T tokens, t tokens and L keys of one sequence, H hidden, N query heads, D head dim, Q width of the query's
latent, R rotated dims, G output groups, W projected width of a compressor, M entries of a sequence, n spans that end in
this step, r tokens a span, k entries chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.indexer import best, marks, row_lengths
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.rope import angles, angles_at
from firstlight.engine.model.spec import Rope
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.attention.reference import cached, visible


class CompressedAttention:
    """x [T, H] -> [T, H]; this rank's heads and output groups, summed over ranks.

    `cache`: the key of every token, the entries, the indexer's keys for them, then for each of the two what waits to
    become an entry.
    """

    def __init__(self, spec: specs.CompressedAttention, weights: Access) -> None:
        self.spec = spec
        self._q_a, self._q_b, self._kv = weights.linear("q_a"), weights.linear("q_b"), weights.linear("kv")
        self._q_a_norm = Norm(spec.norm, weights.into("q_a_norm"))
        self._head_norm = Norm(specs.Norm(eps=spec.norm.eps, weight=False), weights)
        self._kv_norm = Norm(spec.norm, weights.into("kv_norm"))
        self._sinks_N = weights.tensor("sinks")
        self._o_a_GOI = weights.tensor("o_a.weight").unflatten(0, (-1, spec.o_lora_rank))
        self._o_b = weights.linear("o_b")
        self._compressor = (
            Compressor(spec.compressor, spec.rope, weights.into("compressor")) if spec.compressor else None
        )
        self._indexer = SpanIndexer(spec.indexer, spec.rope, weights.into("indexer")) if spec.indexer else None

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, meta = self.spec, batch.attention
        cos_TR, sin_TR = angles(spec.rope, batch)
        latent_TQ = self._q_a_norm(self._q_a(x_TH))
        q_TND = self._head_norm(self._q_b(latent_TQ).unflatten(-1, (-1, spec.head_dim)))
        k_T1D = self._kv_norm(self._kv(x_TH)).unsqueeze(1)
        q_TND, k_T1D = _turned(q_TND, cos_TR, sin_TR, batch), _turned(k_T1D, cos_TR, sin_TR, batch)
        batch.ops.write_cache(k_T1D, k_T1D[..., :1], cache[0], cache[0][..., :1], meta)
        entries: list[Tensor] = []
        chosen: list[Tensor] = []
        if self._compressor is not None:
            entries = self._compressor(x_TH, batch, cache[1], cache[-1] if self._indexer is None else cache[-2])
            chosen = [closed(meta, b, self._compressor.spec.rate, q_TND.device) for b in range(len(entries))]
        if self._indexer is not None:
            chosen = self._indexer(x_TH, latent_TQ, batch, cache[2], cache[-1])
        out_TND = self._attend(q_TND, cache[0], entries, chosen, batch)
        out_TND = _turned(out_TND, cos_TR, -sin_TR, batch)  # the key is its own value: what turned it is taken back
        grouped_TGI = out_TND.reshape(x_TH.shape[0], self._o_a_GOI.shape[0], -1)
        narrow_TGO = torch.einsum("tgi,goi->tgo", grouped_TGI, self._o_a_GOI)
        return batch.comms.heads.all_reduce(self._o_b(narrow_TGO.flatten(1)))

    def _attend(
        self, q_TND: Tensor, keys: Tensor, entries: list[Tensor], chosen: list[Tensor], batch: ForwardBatch
    ) -> Tensor:
        """Over the keys in reach and the entries, laid behind one another as one cache of a page a sequence."""
        meta, window = batch.attention, self.spec.window
        joined, seen = [], []
        for b, (query_len, kv_len) in enumerate(zip(meta.query_lens, meta.kv_lens, strict=True)):
            first = max(0, kv_len - query_len + 1 - window)
            own_LD = cached(keys, meta, b)[0, first:]
            near_tL = visible(query_len, kv_len, window, q_TND.device)[:, first:]
            joined.append(torch.cat((own_LD, entries[b])) if entries else own_LD)
            seen.append(torch.cat((near_tL, chosen[b]), dim=1) if entries else near_tL)
        lengths = [len(one) for one in joined]
        paged = torch.nn.utils.rnn.pad_sequence(joined, batch_first=True).unsqueeze(1)
        pages = [[b] for b in range(len(joined))]
        own_meta = AttentionMeta.build(meta.query_lens, lengths, pages, max(lengths), q_TND.device)
        return batch.ops.selective_attention(
            q_TND, paged, paged, own_meta, self.spec.scale, seen, sinks_N=self._sinks_N
        )


class Compressor:
    """Projects every token and makes an entry of every span that ends; gives all entries of each sequence, [M, D]."""

    def __init__(self, spec: specs.Compressor, rope: Rope, weights: Access) -> None:
        self.spec, self._rope = spec, rope
        self._kv, self._gate = weights.linear("kv"), weights.linear("gate")
        self._bias_rW = weights.tensor("position_bias")
        self._norm = Norm(spec.norm, weights.into("norm"))

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: Tensor, states: Tensor) -> list[Tensor]:
        meta, rate = batch.attention, self.spec.rate
        projected_TW2 = torch.cat((self._kv(x_TH), self._gate(x_TH)), dim=-1)
        found = []
        for b, rows in enumerate(sequences(meta)):
            kv_len, start = meta.kv_lens[b], meta.kv_lens[b] - meta.query_lens[b]
            known_LW2, first = self._known(projected_TW2[rows], start, states[batch.slots[b]])
            self._keep(known_LW2, first, kv_len, states[batch.slots[b]])
            begin, end = start // rate, kv_len // rate
            if end > begin:
                self._write(self._entries(known_LW2, first, begin, end, batch), begin, cache, meta, b)
            found.append(_entries_of(cache, meta, b, rate)[:end])
        return found

    def _known(self, new_tW2: Tensor, start: int, state: Tensor) -> tuple[Tensor, int]:
        """The projections of this step and of those before it that open spans need, and the position of the first."""
        span = self.spec.rate
        first = max(0, (start // span + 1) * span - self.spec.reach)
        if first >= start:
            return new_tW2, start
        kept = state[torch.arange(first, start, device=state.device) % self.spec.reach].to(new_tW2.dtype)
        return torch.cat((kept, new_tW2)), first

    def _keep(self, known_LW2: Tensor, first: int, kv_len: int, state: Tensor) -> None:
        """The last projections, for spans that end in later steps."""
        oldest = max(first, kv_len - self.spec.reach)
        places = torch.arange(oldest, kv_len, device=state.device) % self.spec.reach
        state[places] = known_LW2[oldest - first :].to(state.dtype)

    def _entries(self, known_LW2: Tensor, first: int, begin: int, end: int, batch: ForwardBatch) -> Tensor:
        """Entries [n, D] of the spans begin ... end - 1."""
        spec, rate = self.spec, self.spec.rate
        early = spec.overlap and begin > 0  # a span in front of these takes part
        rows = known_LW2[(begin - early) * rate - first : end * rate - first]
        values_nrW, weights_nrW = rows.unflatten(0, (-1, rate)).chunk(2, dim=-1)
        weights_nrW = weights_nrW.float() + self._bias_rW.float()
        if spec.overlap:
            values_nrW = _with_previous(values_nrW, spec.dim, 0.0, early)
            weights_nrW = _with_previous(weights_nrW, spec.dim, float("-inf"), early)
        entries_nD = self._norm((values_nrW * weights_nrW.softmax(dim=1).to(values_nrW.dtype)).sum(dim=1))
        positions_n = torch.arange(begin, end, device=rows.device) * rate
        return _turned(entries_nD.unsqueeze(1), *angles_at(self._rope, positions_n), batch).squeeze(1)

    def _write(self, entries_nD: Tensor, begin: int, cache: Tensor, meta: AttentionMeta, b: int) -> None:
        pages, slots = _places(meta, b, self.spec.rate, begin, begin + len(entries_nD))
        cache[pages, 0, slots] = entries_nD.to(cache.dtype)


class SpanIndexer:
    """x [T, H] and the query's latent [T, Q] -> the entries that each token attends to, one bool [t, M] a sequence."""

    def __init__(self, spec: specs.SpanIndexer, rope: Rope, weights: Access) -> None:
        self.spec, self._rope = spec, rope
        self._q, self._weights = weights.linear("q"), weights.linear("weights")
        self._compressor = Compressor(spec.compressor, rope, weights.into("compressor"))

    def __call__(
        self, x_TH: Tensor, latent_TQ: Tensor, batch: ForwardBatch, cache: Tensor, states: Tensor
    ) -> list[Tensor]:
        spec, meta, dim = self.spec, batch.attention, self.spec.compressor.dim
        keys = self._compressor(x_TH, batch, cache, states)
        q_TND = _turned(self._q(latent_TQ).unflatten(-1, (-1, dim)), *angles(self._rope, batch), batch)
        weights_TN = self._weights(x_TH).float() * (spec.num_heads * dim) ** -0.5
        found = []
        for b, rows in enumerate(sequences(meta)):
            scores_tNM = torch.relu(torch.einsum("tnd,md->tnm", q_TND[rows].float(), keys[b].float()))
            scores_tM = torch.einsum("tn,tnm->tm", weights_TN[rows], scores_tNM)
            closed_tM = closed(meta, b, spec.compressor.rate, x_TH.device)
            scores_tM = scores_tM.masked_fill(~closed_tM, float("-inf"))
            chosen = [
                marks(best(scores_tM[part], min(spec.topk, row), row), len(keys[b]))
                for part, length in row_lengths(batch, b)
                for row in (length // spec.compressor.rate,)
            ]
            found.append(torch.cat(chosen))
        return found


def sequences(meta: AttentionMeta) -> Iterator[slice]:
    """The rows of each sequence in the batch."""
    start = 0
    for query_len in meta.query_lens:
        yield slice(start, start + query_len)
        start += query_len


def closed(meta: AttentionMeta, b: int, rate: int, device: torch.device) -> Tensor:
    """Which entries of sequence b are made of tokens at or before each of its queries: bool [t, M]."""
    kv_len, query_len = meta.kv_lens[b], meta.query_lens[b]
    entries_M = torch.arange(kv_len // rate, device=device)
    return entries_M < torch.arange(kv_len - query_len + 1, kv_len + 1, device=device)[:, None] // rate


def _turned(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor, batch: ForwardBatch) -> Tensor:
    """The last R dims of every head rotated, in neighbouring pairs."""
    rotated = 2 * cos_TR.shape[-1]
    still, turning = x_TND[..., :-rotated], x_TND[..., -rotated:]
    turned, _ = batch.ops.rotary(turning, turning[:, :1], cos_TR, sin_TR, True)
    return torch.cat((still, turned), dim=-1)


def _with_previous(x_nrW: Tensor, dim: int, nothing: float, early: bool) -> Tensor:
    """Each span's second half of channels behind the first half of the span before: [n, 2 r, D].

    With `early` the first span only lends its first half; without, the first has no span before it: `nothing`.
    """
    lent, own = x_nrW[..., :dim], x_nrW[..., dim:]
    if early:
        return torch.cat((lent[:-1], own[1:]), dim=1)
    return torch.cat((torch.cat((torch.full_like(lent[:1], nothing), lent[:-1])), own), dim=1)


def _places(meta: AttentionMeta, b: int, rate: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Page and slot of the entries begin ... end - 1 of sequence b: those of their last token."""
    device = meta.page_table.device
    last = torch.arange(begin + 1, end + 1, device=device) * rate - 1
    pages = torch.tensor(meta.pages[b], device=device)
    return pages[last // meta.page_size], last % meta.page_size // rate


def _entries_of(cache: Tensor, meta: AttentionMeta, b: int, rate: int) -> Tensor:
    """The entries that sequence b has in the cache, in order: [M, D]."""
    pages, slots = _places(meta, b, rate, 0, meta.kv_lens[b] // rate)
    return cache[pages, 0, slots]
