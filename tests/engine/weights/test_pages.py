"""Memory that is backed in the background: in order, waited for as far as it is needed, given up when asked to."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time

import pytest

from firstlight.engine.weights.loading import pages as module
from firstlight.engine.weights.loading.pages import HUGE_PAGE_BYTES, UNIT_BYTES, Pages, aligned, backed_bytes, reserve
from tests.waiting import PATIENCE_S, until

SIZE = 64 << 20


def backed(pages: Pages) -> int:
    found = backed_bytes(pages.address, pages.nbytes)
    assert found is not None
    return found


def test_nothing_is_there_before_it_is_asked_for_and_all_of_it_after() -> None:
    pages = Pages(SIZE, "test")
    assert backed(pages) < SIZE * 0.1
    pages.wait()
    assert pages.waited_s == 0.0, "nothing was begun"
    pages.back(2)
    pages.wait()
    assert backed(pages) >= SIZE * 0.98
    assert pages.backing_s > 0
    view = memoryview(pages.area)[pages.start : pages.start + SIZE]
    assert not any(view[::4096])


def test_the_start_is_there_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs the first part alone does not wait for the last."""
    gate = threading.Event()
    pages = Pages(SIZE, "test")
    whole = pages._back

    def slow(offset: int, nbytes: int) -> None:
        if offset >= SIZE // 2:
            gate.wait(PATIENCE_S)
        whole(offset, nbytes)

    monkeypatch.setattr(pages, "_back", slow)
    pages.back(2)
    pages.wait(SIZE // 2)
    assert SIZE * 0.4 < backed(pages) < SIZE * 0.6
    late = threading.Thread(target=pages.wait)
    late.start()
    until(lambda: pages._changed._waiters)  # type: ignore[attr-defined]
    time.sleep(0.05)
    assert late.is_alive()
    gate.set()
    late.join(PATIENCE_S)
    assert backed(pages) >= SIZE * 0.98
    assert pages.waited_s > 0.04


def test_stopping_ends_the_threads_and_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    pages = Pages(SIZE, "test")
    monkeypatch.setattr(pages, "_back", lambda offset, nbytes: gate.wait(PATIENCE_S))
    pages.back(1)
    waiting = threading.Thread(target=pages.wait, args=(SIZE // 2,))
    waiting.start()
    stopping = threading.Thread(target=pages.stop)
    stopping.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    gate.set()
    stopping.join(PATIENCE_S)
    assert not [one for one in threading.enumerate() if one.name.startswith("pages-")]
    assert backed(pages) < SIZE * 0.1


def test_slow_huge_pages_are_given_up_after_a_few_and_said() -> None:
    pages = Pages(SIZE, "test")
    pages.back(2, slow_huge_page_s=0.0)
    pages.wait()
    assert pages.reason is not None
    assert "small ones are used" in pages.reason
    assert backed(pages) >= SIZE * 0.98


@pytest.mark.parametrize(
    ("pages_s", "turns"),
    [([2.0], False), ([2.0, 0.5, 3.0], False), ([2.0, 1.5], True), ([4.5], True), ([0.1, 5.0], True)],
)
def test_two_slow_pages_tell_or_one_that_is_hopeless(pages_s: list[float], turns: bool) -> None:
    pace = module._Pace(slow_s=1.0)
    for seconds in pages_s:
        assert not pace.turns_slow()
        pace.took(seconds)
    assert pace.turns_slow() == pace.is_slow == turns
    assert not pace.turns_slow(), "it is told once"


def test_one_page_tells_whether_huge_ones_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one; whoever cannot wait until it does has small ones, and no other huge one is asked for meanwhile."""
    pages, whole, gate = Pages(SIZE, "test"), Pages._back, threading.Event()
    last, asked = SIZE - HUGE_PAGE_BYTES, list[tuple[int, int]]()

    def back(offset: int, nbytes: int) -> None:
        asked.append((offset, nbytes))
        if offset == last:
            gate.wait(PATIENCE_S)
        whole(pages, offset, nbytes)

    monkeypatch.setattr(pages, "_back", back)
    pages.back(1, slow_huge_page_s=math.inf)
    until(lambda: asked == [(last, HUGE_PAGE_BYTES)])
    pages.take_over()
    pages.provide(5, 4096)
    pages.provide(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + UNIT_BYTES)
    assert asked[1:] == [(0, UNIT_BYTES), (HUGE_PAGE_BYTES, UNIT_BYTES)]
    gate.set()
    until(lambda: pages._untried is None)
    pages.provide(4 * HUGE_PAGE_BYTES + 5, 4 * HUGE_PAGE_BYTES + 6)
    assert asked[3:] == [(4 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)]
    pages.wait()
    pages.check()
    assert backed(pages) >= SIZE * 0.98


def test_an_area_starts_on_a_huge_page_and_sizes_are_those_of_tensors() -> None:
    pages = reserve([1, 64, 65], threads=1)
    pages.wait()
    assert pages.address % HUGE_PAGE_BYTES == 0
    assert pages.nbytes == aligned(1) + aligned(64) + aligned(65) == 256


def test_reserving_and_reading_load_no_torch() -> None:
    """A start reserves its memory, from here or afar, while torch is still being imported."""
    names = ("loading.pages", "loading.readers", "sources.mirror", "sources.http", "checkpoint", "ledger")
    code = "import sys\n" + "".join(f"import firstlight.engine.weights.{name}\n" for name in names)
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True, timeout=PATIENCE_S)


def slow_backing(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Nothing but the page that is tried is backed before the event; the offsets are noted."""
    gate, backed_at = threading.Event(), []
    whole = pages._back

    def back(offset: int, nbytes: int) -> None:
        if pages._untried is None:
            gate.wait(PATIENCE_S)
        backed_at.append(offset)
        whole(offset, nbytes)

    monkeypatch.setattr(pages, "_back", back)
    return gate, backed_at


def test_who_takes_over_has_backed_what_it_needs_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that one of them is at is theirs to finish; a page that was never needed is backed at the end."""
    pages = Pages(SIZE, "test")
    gate, backed_at = slow_backing(pages, monkeypatch)
    pages.back(1, slow_huge_page_s=PATIENCE_S)
    until(lambda: pages._untried is None)
    pages.take_over()
    gate.set()
    needed = SIZE - HUGE_PAGE_BYTES - 5
    pages.provide(needed, needed + 10)
    assert sorted(backed_at)[-2:] == [SIZE - 2 * HUGE_PAGE_BYTES, SIZE - HUGE_PAGE_BYTES]
    assert len(backed_at) <= 3
    pages.provide(needed, needed + 10)
    assert len(backed_at) <= 3, "nothing is backed twice"
    pages.check()
    pages.wait()
    assert sorted(backed_at) == list(range(0, SIZE, HUGE_PAGE_BYTES))
    assert not [one for one in threading.enumerate() if one.name.startswith("pages-")]
    assert pages.waited_s > 0
    assert pages.backing_s > 0
    pages.check()


def test_many_that_need_the_same_page_wait_for_the_one_that_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(SIZE, "test")
    gate, backed_at = slow_backing(pages, monkeypatch)
    pages.back(1, slow_huge_page_s=PATIENCE_S)
    until(lambda: pages._untried is None)
    pages.take_over()
    writers = [threading.Thread(target=pages.provide, args=(SIZE // 2 + n, SIZE // 2 + n + 1)) for n in range(5)]
    for writer in writers:
        writer.start()
    time.sleep(0.05)
    assert all(writer.is_alive() for writer in writers)
    gate.set()
    for writer in writers:
        writer.join(PATIENCE_S)
    assert backed_at.count(SIZE // 2) == 1
    pages.stop()
    pages.check()


def test_small_pages_are_backed_where_each_writer_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of them is at its half of a huge page, others finish theirs; what they ask for is one call."""
    pages, whole = Pages(SIZE, "test"), Pages._back
    begun, _ = slow_backing(pages, monkeypatch)
    pages.back(1, slow_huge_page_s=0.0)
    until(lambda: pages._untried is None)
    pages.take_over()
    begun.set()
    pages.provide(0, 4 * HUGE_PAGE_BYTES)
    gate, is_at, backed_at = threading.Event(), threading.Event(), list[tuple[int, int]]()

    def back(offset: int, nbytes: int) -> None:
        backed_at.append((offset, nbytes))
        if offset == last:
            is_at.set()
            gate.wait(PATIENCE_S)
        whole(pages, offset, nbytes)

    monkeypatch.setattr(pages, "_back", back)
    last, half = SIZE - 2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES // 2  # behind it lies the page that was tried
    writer = threading.Thread(target=pages.provide, args=(last, last + half))
    writer.start()
    assert is_at.wait(PATIENCE_S)
    pages.provide(last + half, SIZE)
    pages.provide(last - 3 * HUGE_PAGE_BYTES - 1, last)
    assert writer.is_alive()
    gate.set()
    writer.join(PATIENCE_S)
    start = last - 3 * HUGE_PAGE_BYTES - UNIT_BYTES
    assert backed_at == [(last, half), (last + half, half), (start, last - start)]
    pages.wait()
    pages.check()
    assert backed(pages) >= SIZE * 0.98


def test_taking_over_wakes_whoever_waits_for_the_threads_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(SIZE, "test")
    gate, _ = slow_backing(pages, monkeypatch)
    pages.back(2)
    waiting = threading.Thread(target=pages.wait)
    waiting.start()
    pages.take_over()
    gate.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert backed(pages) >= SIZE * 0.98


def test_stopping_leaves_nobody_waiting_for_a_page_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(SIZE, "test")
    gate, backed_at = slow_backing(pages, monkeypatch)
    pages.back(1)
    pages.take_over()
    writer = threading.Thread(target=pages.provide, args=(0, SIZE))
    writer.start()
    stopping = threading.Thread(target=pages.stop)
    stopping.start()
    until(lambda: pages._stop)
    gate.set()
    for thread in (writer, stopping):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(backed_at) < SIZE // HUGE_PAGE_BYTES
    pages.provide(0, SIZE)


class Clocks:
    """Time as two threads have it that never wait for each other: ours, and others that use `others` cores."""

    def __init__(self, others: float) -> None:
        self.others, self.now_s, self.own_s, self.others_s = others, 0.0, 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.own_s

    def process_time(self) -> float:
        return self.own_s + self.others_s

    def work(self, seconds: float) -> None:
        self.own_s += seconds
        self.sleep(seconds)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.others_s += self.others * seconds


@pytest.mark.parametrize(("others", "share"), [(2.0, 0.1), (0.3, 0.1), (0.01, 1.0)])
@pytest.mark.parametrize("piece_s", [1e-5, 50e-3])
def test_joining_takes_its_share_of_the_time_while_others_compute(
    monkeypatch: pytest.MonkeyPatch, others: float, share: float, piece_s: float
) -> None:
    clocks = Clocks(others)
    monkeypatch.setattr(module, "time", clocks)
    joining = module._Share(module.JOINING_SHARE)
    for _ in range(2000):
        clocks.work(piece_s)
        joining.rest()
    assert clocks.own_s / clocks.now_s == pytest.approx(share, rel=0.1)


def test_joining_rests_once_more_at_most_when_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(1.0)
    monkeypatch.setattr(module, "time", clocks)
    joining = module._Share(module.JOINING_SHARE)
    for _ in range(10):
        clocks.work(4e-3)
        joining.rest()
    assert clocks.now_s == pytest.approx(10 * 40e-3)
    clocks.others = 0.0
    for _ in range(10):
        clocks.work(4e-3)
        joining.rest()
    assert clocks.now_s == pytest.approx(11 * 40e-3 + 9 * 4e-3)
