"""What holds for every implementation of attention, whatever the numbers: batches, pages and steps do not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.registry import choose

NAMES = ("reference", "sdpa", "triton")
LENGTHS = (5, 17, 1, 9)


def run(
    name: str, query_lens: list[int], lengths: list[int], pages: list[list[int]], page_size: int, x: Tensor
) -> Tensor:
    """Fill a cache with the first keys of each sequence, then attend from its last `query_lens` tokens."""
    ops = choose("cpu", torch.float32, force={"attention": name}, interpret=True)
    num_pages = max(page for own in pages for page in own) + 1
    k_cache, v_cache = torch.zeros(2, num_pages, 2, page_size, 16)
    past = [length - count for length, count in zip(lengths, query_lens, strict=True)]
    rows = [x[b, :length] for b, length in enumerate(lengths)]
    if any(past):
        kept = [b for b, count in enumerate(past) if count]
        meta = AttentionMeta.build(
            [past[b] for b in kept], [past[b] for b in kept], [pages[b] for b in kept], page_size
        )
        old = torch.cat([rows[b][: past[b]] for b in kept])
        ops.write_cache(old[:, 4:6], old[:, 6:8], k_cache, v_cache, meta)
    meta = AttentionMeta.build(query_lens, lengths, pages, page_size)
    new = torch.cat([row[count:] for row, count in zip(rows, past, strict=True)])
    ops.write_cache(new[:, 4:6], new[:, 6:8], k_cache, v_cache, meta)
    return ops.attention(new[:, :4], k_cache, v_cache, meta, 0.25)


@pytest.fixture
def x() -> Tensor:
    """[sequence, position, 4 query + 2 key + 2 value heads, 16]"""
    return torch.randn(4, 20, 8, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_does_not_feel_its_neighbours(name: str, x: Tensor) -> None:
    pages = [[2], [0], [3], [1]]
    together = run(name, list(LENGTHS), list(LENGTHS), pages, 20, x).split(LENGTHS)
    for b, length in enumerate(LENGTHS):
        alone = run(name, [length], [length], [[0]], 20, x[b : b + 1])
        torch.testing.assert_close(together[b], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_step_by_step_is_all_at_once(name: str, x: Tensor) -> None:
    whole = run(name, list(LENGTHS), list(LENGTHS), [[0], [1], [2], [3]], 20, x).split(LENGTHS)
    last = run(name, [1, 1, 1, 1], list(LENGTHS), [[0], [1], [2], [3]], 20, x)
    for b in range(4):
        torch.testing.assert_close(last[b], whole[b][-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [5, 3, 1, 9]])
def test_where_the_pages_lie_does_not_matter(name: str, query_lens: list[int], x: Tensor) -> None:
    one_page = run(name, query_lens, list(LENGTHS), [[0], [1], [2], [3]], 20, x)
    scattered = run(name, query_lens, list(LENGTHS), [[5], [1], [2], [9]], 20, x)
    small_pages = run(name, query_lens, list(LENGTHS), [[3, 9], [0, 7, 1, 2, 8], [5], [6, 4, 11]], 4, x)
    torch.testing.assert_close(scattered, one_page, rtol=0, atol=1e-6)
    torch.testing.assert_close(small_pages, one_page, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_unused_slots_may_hold_anything(name: str, x: Tensor) -> None:
    """Also NaN. Only sdpa on CPUs asks for finite numbers there, and says so."""
    ops = choose("cpu", torch.float32, force={"attention": name}, interpret=True)
    meta = AttentionMeta.build([1, 1], [3, 6], [[0], [1]], 8)
    k_cache, v_cache = torch.randn(2, 2, 2, 8, 16)
    clean = ops.attention(x[0, :2, :4], k_cache, v_cache, meta, 0.25)
    for cache in (k_cache, v_cache):
        cache[0, :, 3:] = float("nan")
        cache[1, :, 6:] = float("nan")
    torch.testing.assert_close(ops.attention(x[0, :2, :4], k_cache, v_cache, meta, 0.25), clean, rtol=0, atol=0)


def test_layers_of_a_step_share_their_masks(x: Tensor) -> None:
    ops = choose("cpu", torch.float32, force={"attention": "sdpa"})
    meta = AttentionMeta.build([1, 1], [3, 6], [[0], [1]], 8)
    k_cache, v_cache = torch.randn(2, 2, 2, 8, 16)
    for window in (None, 4):
        ops.attention(x[0, :2, :4], k_cache, v_cache, meta, 0.25, window)
    plans = dict(meta.memo)
    for window in (None, 4):
        ops.attention(x[0, :2, :4], k_cache, v_cache, meta, 0.25, window)
    assert len(plans) == 2
    assert all(meta.memo[key] is plan for key, plan in plans.items())


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "pages"),
    [([2], [9], [[0]]), ([3], [2], [[0]]), ([0], [2], [[0]])],
    ids=["more than the pages hold", "more new than cached", "no tokens"],
)
def test_impossible_lengths_are_refused(query_lens: list[int], kv_lens: list[int], pages: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        AttentionMeta.build(query_lens, kv_lens, pages, 8)


def test_meta_says_where_tokens_go() -> None:
    meta = AttentionMeta.build([3, 1], [9, 2], [[4, 1, 7], [0]], 4)
    assert meta.token_page.tolist() == [1, 1, 7, 0]
    assert meta.token_slot.tolist() == [2, 3, 0, 1]
    assert meta.query_start.tolist() == [0, 3, 4]
    assert (meta.max_query_len, meta.max_kv_len) == (3, 9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0, 5, 7], ids=["query", "key", "value"])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (5, 5), (9, 1), (17, 17)])
def test_a_number_that_is_none_is_not_swallowed(name: str, part: int, length: int, count: int, x: Tensor) -> None:
    """torch's fused operator on CPUs takes scores that are NaN for masked ones where keys are few: zeros come out."""
    x[0, length - 1, part, 3] = torch.nan
    together = run(name, [count, 1], [length, 7], [[0], [1]], 20, x[:2])
    assert together[count - 1].isnan().any()
    assert together[count].isfinite().all(), "a neighbour's fault is none of its own"


@pytest.mark.parametrize("part", [slice(0, 4), slice(4, 6)], ids=["queries", "keys"])
@pytest.mark.parametrize("count", [1, 9])
def test_large_numbers_are_none_of_those(part: slice, count: int, x: Tensor) -> None:
    """Finite values whose sum is not, and whose products with the other side are ordinary."""
    x[..., :6, :] *= 1e-37
    x[..., part, :] = x[..., part, :].abs() * 1e37 * 3e37 + 2.5e37
    assert x.isfinite().all()
    assert not x[0, 0, part].sum(dim=-1).isfinite().all()
    sdpa, reference = (run(name, [count], [9], [[0]], 20, x[:1]) for name in ("sdpa", "reference"))
    torch.testing.assert_close(sdpa, reference)
