"""Where the tokens of a ragged batch sit and where their cache pages are: made once a step, shared by all layers.

Legend: B sequences, T tokens of all sequences flattened, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """The lengths and pages of a batch, on the device for kernels and on the host for paths that loop over sequences.

    Query t of sequence b is token `query_start[b] + t` of the batch and sits at position `kv_len[b] - query_len[b] +
    t` of its sequence; `kv_len` counts the current tokens. Key position p of sequence b is in page `page_table[b, p
    // S]`, slot `p % S`. `token_page` and `token_slot` say where each current token's key and value are to be
    written.
    """

    query_start: Tensor  # [B + 1] int32
    kv_len: Tensor  # [B] int32
    page_table: Tensor  # [B, most pages of a sequence] int32, padded with 0
    token_page: Tensor  # [T] int64
    token_slot: Tensor  # [T] int64
    page_size: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    max_query_len: int
    max_kv_len: int
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Derived tensors (masks, say) that the first layer of a step computes and the other layers find."""

    @staticmethod
    def build(
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMeta:
        """Make the tables from host lists; `pages[b]` lists those of sequence b in order (spare ones are fine).

        A sequence whose pages do not hold its `kv_len`, or with fewer cached than current tokens, is a ValueError.
        """
        token_pages: list[int] = []
        token_slots: list[int] = []
        for b, (query_len, kv_len, own) in enumerate(zip(query_lens, kv_lens, pages, strict=True)):
            if not 0 < query_len <= kv_len <= len(own) * page_size:
                raise ValueError(
                    f"sequence {b}: {query_len} tokens of {kv_len} in {len(own)} pages of {page_size} slots cannot be"
                )
            for position in range(kv_len - query_len, kv_len):
                token_pages.append(own[position // page_size])
                token_slots.append(position % page_size)
        width = max((len(own) for own in pages), default=1)
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        table = [[*own, *([0] * (width - len(own)))] for own in pages]
        return AttentionMeta(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            kv_len=torch.tensor(list(kv_lens), dtype=torch.int32, device=device),
            page_table=torch.tensor(table, dtype=torch.int32, device=device).view(len(table), width),
            token_page=torch.tensor(token_pages, dtype=torch.int64, device=device),
            token_slot=torch.tensor(token_slots, dtype=torch.int64, device=device),
            page_size=page_size,
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            pages=tuple(tuple(own) for own in pages),
            max_query_len=max(query_lens, default=0),
            max_kv_len=max(kv_lens, default=0),
        )
