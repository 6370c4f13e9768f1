"""Memory that is backed in the background: in order, waited for as far as it is needed, given up when asked to."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from firstlight.engine.weights.pages import HUGE_PAGE_BYTES, Pages, aligned, backed_bytes, reserve

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
            gate.wait(10)
        whole(offset, nbytes)

    monkeypatch.setattr(pages, "_back", slow)
    pages.back(2)
    pages.wait(SIZE // 2)
    assert SIZE * 0.4 < backed(pages) < SIZE * 0.6
    late = threading.Thread(target=pages.wait)
    late.start()
    time.sleep(0.05)
    assert late.is_alive()
    gate.set()
    late.join(10)
    assert backed(pages) >= SIZE * 0.98
    assert pages.waited_s > 0.04


def test_stopping_ends_the_threads_and_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    pages = Pages(SIZE, "test")
    monkeypatch.setattr(pages, "_back", lambda offset, nbytes: gate.wait(10))
    pages.back(1)
    waiting = threading.Thread(target=pages.wait, args=(SIZE // 2,))
    waiting.start()
    stopping = threading.Thread(target=pages.stop)
    stopping.start()
    waiting.join(10)
    assert not waiting.is_alive()
    gate.set()
    stopping.join(10)
    assert not [one for one in threading.enumerate() if one.name.startswith("pages-")]
    assert backed(pages) < SIZE * 0.1


def test_slow_huge_pages_are_given_up_after_a_few_and_said() -> None:
    pages = Pages(SIZE, "test")
    pages.back(2, slow_huge_page_s=0.0)
    pages.wait()
    assert pages.reason is not None
    assert "small ones are used" in pages.reason
    assert backed(pages) >= SIZE * 0.98


def test_an_area_starts_on_a_huge_page_and_sizes_are_those_of_tensors() -> None:
    pages = reserve([1, 64, 65], threads=1)
    pages.wait()
    assert pages.address % HUGE_PAGE_BYTES == 0
    assert pages.nbytes == aligned(1) + aligned(64) + aligned(65) == 256


def test_reserving_and_reading_load_no_torch() -> None:
    """A start reserves its memory, from here or afar, while torch is still being imported."""
    names = ("pages", "readers", "sources.mirror", "sources.http", "checkpoint", "ledger")
    code = "import sys\n" + "".join(f"import firstlight.engine.weights.{name}\n" for name in names)
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True, timeout=60)
