"""What the shared cases of attention are too small to show natively: several blocks, and equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.kernels.attention import native, reference
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.native.build import available

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 64


class Batch:
    """Sequences of random queries, keys and values, each with pages of its own, of which any selection can be run."""

    def __init__(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        random = torch.Generator().manual_seed(sum(kv_lens))
        self.lens = list(zip(query_lens, kv_lens, strict=True))
        self.pages: list[list[int]] = []
        for length in kv_lens:
            first = sum(len(own) for own in self.pages)
            self.pages.append(list(range(first, first + -(-length // PAGE))))
        shape = (sum(len(own) for own in self.pages), KV_HEADS, PAGE, DIM)
        self.k, self.v = (torch.randn(shape, generator=random).bfloat16() for _ in range(2))
        self.queries = [torch.randn(length, HEADS, DIM, generator=random).bfloat16() for length in query_lens]

    def run(self, attention: Any, chosen: Sequence[int], **rules: Any) -> list[Tensor]:
        """The outputs of the chosen sequences, computed as one batch."""
        query_lens, kv_lens = zip(*(self.lens[b] for b in chosen), strict=True)
        meta = AttentionMeta.build(query_lens, kv_lens, [self.pages[b] for b in chosen], PAGE)
        q_TND = torch.cat([self.queries[b] for b in chosen])
        return list(attention(q_TND, self.k, self.v, meta, DIM**-0.5, **rules).split(query_lens))


@pytest.mark.parametrize(
    "rules",
    [{}, {"window": 1}, {"window": 64}, {"window": 300}, {"softcap": 10.0}, {"sinks_N": torch.randn(HEADS)}],
    ids=lambda rules: " ".join(rules) or "plain",
)
def test_blocks_of_queries_and_keys_join_up(rules: dict[str, Any]) -> None:
    batch = Batch([300, 1, 129, 1], [700, 600, 129, 1])
    got = torch.cat(batch.run(native.attention, range(4), **rules)).float()
    want = torch.cat(batch.run(reference.attention, range(4), **rules)).float()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, atol=8e-3, rtol=1.6e-2)


def test_a_sequence_gives_the_same_bits_in_any_company() -> None:
    batch = Batch([1, 1, 90, 1], [700, 3, 200, 256])
    together = batch.run(native.attention, range(4))
    for b in range(4):
        assert torch.equal(batch.run(native.attention, [b])[0], together[b])
    assert torch.equal(batch.run(native.attention, [3, 0])[1], together[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert all(torch.equal(*pair) for pair in zip(batch.run(native.attention, range(4)), together, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    batch = Batch([1, 70], [65, 100])
    want = batch.run(native.attention, [0, 1])
    for b, (_, length) in enumerate(batch.lens):
        for cache in (batch.k, batch.v):
            cache[batch.pages[b][-1], :, length % PAGE :] = float("nan")
    assert all(torch.equal(*pair) for pair in zip(batch.run(native.attention, [0, 1]), want, strict=True))
