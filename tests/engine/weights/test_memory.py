from __future__ import annotations

import math
import mmap
import platform
import threading
from pathlib import Path

import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.room import available_bytes
from firstlight.engine.weights.loading.pages import (
    HUGE_FROM_BYTES,
    HUGE_PAGE_BYTES,
    huge_page_bytes,
)
from firstlight.engine.weights.memory import Pool, aligned, measure_read_bandwidth, writable_bytes
from tests.costs import own_bytes


def has_collapse() -> bool:
    """MADV_COLLAPSE came with Linux 6.1; nothing is joined where huge pages are off."""
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return release >= (6, 1) and "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()


def has_room() -> bool:
    """The system has huge pages to give without moving others' memory: a machine that ran for long may have none."""
    counts = [[int(word) for word in line.split()[4:]] for line in Path("/proc/buddyinfo").read_text().splitlines()]
    return sum(count << (order - 9) for zone in counts for order, count in enumerate(zone) if order >= 9) >= 200


def test_tensors_are_aligned_contiguous_zero_and_do_not_overlap() -> None:
    shapes = [
        ((3, 5), torch.bfloat16),
        ((7,), torch.float32),
        ((), torch.int64),
        ((0, 4), torch.float16),
        ((130,), torch.uint8),
    ]
    pool = Pool.reserve(1 << 16, "weights")
    tensors = [pool.take(shape, dtype) for shape, dtype in shapes]
    for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        assert not tensor.any()
    for value, tensor in enumerate(tensors, start=1):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors, start=1):
        assert (tensor == value).all()
    pool.check()
    assert pool.report().taken_bytes == sum(aligned(tensor.nbytes) for tensor in tensors)


def test_a_pool_never_grows() -> None:
    pool = Pool.reserve(256, "cache")
    pool.take((32,), torch.float32)
    with pytest.raises(MemoryError, match=r"pool 'cache' of 256 bytes has 128 left; 192 were asked for \[33\]"):
        pool.take((33,), torch.float32)
    pool.take((32,), torch.float32)
    assert pool.free_bytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4097, HUGE_FROM_BYTES + 12345])
def test_any_size_is_reserved_exactly(nbytes: int) -> None:
    pool = Pool.reserve(nbytes, "odd")
    assert pool.reserved_bytes == pool.free_bytes == nbytes
    if nbytes % 64 == 0:
        pool.take((nbytes,), torch.uint8)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_page_is_there_after_reserve(threads: int) -> None:
    nbytes = 64 << 20
    before = own_bytes()
    pool = Pool.reserve(nbytes, "weights", threads=threads)
    assert own_bytes() - before >= nbytes * 0.98
    assert pool.report().reserve_s > 0


def test_pages_come_with_their_first_use_if_asked() -> None:
    nbytes = 64 << 20
    before = own_bytes()
    pool = Pool.reserve(nbytes, "weights", populate=False)
    assert own_bytes() - before < nbytes * 0.1
    assert not pool.take((nbytes // 8,), torch.int64).fill_(1).eq(0).any()
    assert own_bytes() - before >= nbytes * 0.98


def test_memory_goes_back_with_the_last_tensor_and_not_before() -> None:
    nbytes = 64 << 20

    def kept_bytes() -> int:
        before = own_bytes()
        tensor = Pool.reserve(nbytes, "weights").take((nbytes // 4,), torch.float32)
        assert own_bytes() - before >= nbytes * 0.98
        tensor.fill_(2.0)
        assert tensor[-1] == 2.0
        del tensor
        return own_bytes() - before

    assert any(kept_bytes() < nbytes * 0.1 for _ in range(5)), "it stays each time"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no transparent huge pages")
def test_report_says_what_the_system_gave() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    asked = Pool.reserve(64 << 20, "weights", slow_huge_page_s=math.inf).report()
    assert asked.huge_page_bytes is not None
    assert asked.huge_page_bytes % HUGE_PAGE_BYTES == 0
    assert asked.huge_page_reason is None
    if "[never]" not in enabled and has_room():
        assert asked.huge_page_bytes >= 32 << 20, (
            "the system grants huge pages but gave fewer than half of those asked for"
        )
    not_asked = Pool.reserve(64 << 20, "weights", huge_pages=False).report()
    assert not_asked.huge_page_bytes == 0


def test_huge_pages_of_neighbouring_pools_are_told_apart() -> None:
    with_huge = Pool.reserve(64 << 20, "a")
    without = Pool.reserve(64 << 20, "b", huge_pages=False)
    again = Pool.reserve(64 << 20, "c")
    assert without.report().huge_page_bytes == 0
    first = with_huge.take((1,), torch.uint8).data_ptr()
    assert huge_page_bytes(first, 64 << 20)[0] == with_huge.report().huge_page_bytes
    assert again.report().huge_page_bytes is not None


def test_more_than_there_is_is_refused_before_the_system_kills_us() -> None:
    available = available_bytes()
    assert available is not None
    with pytest.raises(Refused) as refused:
        Pool.reserve(available * 2, "weights")
    (finding,) = refused.value.findings
    assert finding.code == "does-not-fit"
    assert str(available * 2) in str(finding.expected)


def test_writable_bytes_is_the_tensors_own_memory() -> None:
    tensor = Pool.reserve(1024, "weights").take((2, 3), torch.bfloat16)
    view = writable_bytes(tensor)
    assert view.nbytes == tensor.nbytes
    view[:] = torch.full((2, 3), 1.5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert (tensor == 1.5).all()


def test_read_bandwidth_is_of_this_world() -> None:
    assert 0.5e9 < measure_read_bandwidth(nbytes=64 << 20, repeats=3) < 20e12


def test_slow_huge_pages_are_not_waited_for() -> None:
    before = own_bytes()
    pool = Pool.reserve(64 << 20, "weights", threads=2, slow_huge_page_s=0.0)
    assert own_bytes() - before >= (64 << 20) * 0.98
    report = pool.report()
    assert report.huge_page_reason is not None
    assert "ms to provide a huge page" in report.huge_page_reason
    assert report.huge_page_bytes is not None
    assert report.huge_page_bytes <= 8 * HUGE_PAGE_BYTES
    data = pool.take((8 << 20,), torch.int64).random_()
    before_joining = data.clone()
    pool.join_pages()
    for thread in threading.enumerate():
        if thread.name == "join weights":
            thread.join()
    if has_collapse() and has_room():
        assert (pool.report().huge_page_bytes or 0) >= 60 << 20
    assert torch.equal(data, before_joining)
    pool.check()
