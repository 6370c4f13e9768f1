"""A page that stays open while readings come ten times a second does not grow, nor does its server."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from firstlight.workbench.readings import Reading
from firstlight.workbench.runs import Run
from tests.dashboards.conftest import Errors, serve

DEVICES, METRICS = 8, ("power", "utilisation", "memory_used", "temperature")
FIRST_S, LAST_S = 20.0, 60.0  # by the first moment every series holds as many readings as it ever will


def feed(run: Run, end: threading.Event) -> None:
    tick = 0
    while not end.wait(0.1):
        tick += 1
        for device in range(DEVICES):
            for metric in METRICS:
                name, value = f"gpu {device}", 100.0 + tick % 37 + device
                run.events.put(
                    Reading(time_s=time.time(), source="nvml", device=name, metric=metric, unit="W", value=value)
                )


def measured(page: Any, server: psutil.Process) -> dict[str, float]:
    """The least of several looks: what is being drawn anew is there twice for a moment."""
    looks = []
    for _ in range(6):
        looks.append(_look(page, server))
        page.wait_for_timeout(500)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _look(page: Any, server: psutil.Process) -> dict[str, float]:
    """Nodes and listeners of the page, its heap and the server's memory in MiB, both after collecting."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return {
        "nodes": found["Nodes"],
        "listeners": found["JSEventListeners"],
        "heap": found["JSHeapUsedSize"] / 2**20,
        "server": server.memory_info().rss / 2**20,
    }


@pytest.mark.slow
def test_a_page_left_open_does_not_grow(browser: Any, tmp_path: Path, errors: Errors) -> None:
    end = threading.Event()
    with Run.at(tmp_path / "busy", "busy", "ckpt") as run:
        thread = threading.Thread(target=feed, args=(run, end), daemon=True)
        thread.start()
        try:
            for address in serve(str(tmp_path), "--port", "0"):
                (server,) = [one for one in psutil.Process().children() if str(tmp_path) in one.cmdline()]
                page = errors.watch(browser.new_page())
                page.goto(f"{address}?run=busy&tab=Hardware")
                page.get_by_text(f"gpu {DEVICES - 1}").first.wait_for(timeout=60_000)
                page.wait_for_timeout(1000 * FIRST_S)
                first = measured(page, server)
                shown = page.locator(".v").first.inner_text()
                page.wait_for_timeout(1000 * (LAST_S - FIRST_S))
                last = measured(page, server)
                assert page.locator(".v").first.inner_text() != shown, "the page still follows"
                page.close()
        finally:
            end.set()
            thread.join()
    print(first, last)
    assert last["nodes"] <= 1.1 * first["nodes"] + 200
    assert last["listeners"] <= 1.1 * first["listeners"] + 20
    assert last["heap"] <= first["heap"] + 4
    assert last["server"] <= first["server"] + 24
    assert not errors
