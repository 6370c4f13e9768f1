"""A page that stays open while readings come as fast as it can show them does not grow, nor does its server."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from firstlight.dashboards.trails import SPAN_S
from firstlight.workbench.readings import Reading
from firstlight.workbench.runs import Run
from tests.dashboards.conftest import Errors, serve

DEVICES, METRICS = 8, ("power", "utilisation", "memory_used", "temperature")
SHOWS = """(text) => {
  const find = (node) => node.nodeType === 3 ? node.data.includes(text)
    : [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes].some(find);
  return find(document.body);
}"""


class Feed:
    """Readings of every device, all with the same value: 101, 102, ..."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._time_s = time.time() - 2 * SPAN_S
        self._value = 100
        for _ in range(int(SPAN_S)):  # every series holds as many as it ever will
            self._put(1.0)
        assert run.events.flush()

    def show(self, page: Any, changes: int) -> None:
        """So many changes, each as soon as the one before it is seen on the page."""
        for _ in range(changes):
            self._put(1.0)
            page.wait_for_function(SHOWS, arg=f"{self._value} W")

    def _put(self, later_s: float) -> None:
        self._time_s, self._value = self._time_s + later_s, self._value + 1
        for device in range(DEVICES):
            for metric in METRICS:
                one = {"source": "nvml", "device": f"gpu {device}", "metric": metric, "unit": "W"}
                self._run.events.put(Reading(time_s=self._time_s, value=float(self._value), **one))


def measured(page: Any, server: psutil.Process) -> dict[str, float]:
    """Nodes and listeners of the page, its heap and the server's memory in MiB, both after collecting."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
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
    with Run.at(tmp_path / "busy", "busy", "ckpt") as run:
        feed = Feed(run)
        for address in serve(str(tmp_path), "--port", "0"):
            (server,) = [one for one in psutil.Process().children() if str(tmp_path) in one.cmdline()]
            page = errors.watch(browser.new_page())
            page.goto(f"{address}?run=busy&tab=Hardware")
            page.get_by_text(f"gpu {DEVICES - 1}").first.wait_for()
            feed.show(page, 20)
            first = measured(page, server)
            feed.show(page, 60)
            last = measured(page, server)
            page.close()
    print(first, last)
    assert last["nodes"] <= first["nodes"] + 100
    assert last["listeners"] <= first["listeners"] + 10
    assert last["heap"] <= first["heap"] + 2
    assert last["server"] <= first["server"] + 4
    assert not errors
