"""The dashboard: first paint, a day of 64 devices, a ledger of half a million rows, and what ten updates a second cost.

    python -m tests.benchmarks.bench_dashboard

Pages are opened in Chromium on loopback, again and again in new contexts, nothing cached; medians. First useful paint:
what was asked for can be read. Live: the components have taken its place. Curves: the figure is drawn. The day is 1 Hz
x 64 devices x one metric, 5.5 million rows, as a run's writer leaves them.

A browser that is driven from outside parses a script a second time where it throws, which nobody's own browser does;
for plotly that is half a second of processor time, and `UNDRIVEN` spares it.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from firstlight.dashboards.store import Follower
from firstlight.workbench import readings
from firstlight.workbench.events import SCHEMA, EventWriter
from firstlight.workbench.ledger_file import COLUMNS, FILE, LedgerFile
from firstlight.workbench.readings import Reading
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run
from tests.browser import ARGUMENTS, BROWSER

DAY_S = 86_400
DEVICES = 64
LEDGER_ROWS = 497_220
UNDRIVEN = "--js-flags=--no-enable-lazy-source-positions"
IS_LIVE = "document.readyState === 'complete' && !document.querySelector('.fl-first')"
COUNT_CHANGES = """() => {
  window.seen = 0;
  const watch = (root) => {
    new MutationObserver(() => window.seen++).observe(root, {childList: true, subtree: true});
    root.querySelectorAll("*").forEach((one) => one.shadowRoot && watch(one.shadowRoot));
  };
  watch(document.querySelector("#fl-main"));
}"""


def reading(time_s: float, device: str, metric: str, value: float) -> Reading:
    return Reading(time_s=time_s, source="nvml", device=device, metric=metric, unit="W", value=value, step=int(time_s))


def a_day(root: Path) -> None:
    """A run with a day of readings."""
    run = Run.at(root / "day", "day", "ckpt")
    connection = sqlite3.connect(run.directory / "events.sqlite")
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = off")
    connection.executescript(SCHEMA + readings.SCHEMA)
    writer = readings.ReadingWriter(connection)
    for minute in range(0, DAY_S, 60):
        seconds = range(minute, minute + 60)
        writer.add(reading(float(s), f"gpu {d}", "power", 300 + d + s % 60) for s in seconds for d in range(DEVICES))
        if minute % 3600 == 0:
            connection.commit()
    connection.commit()
    connection.close()


def a_ledger(root: Path) -> None:
    """A run with the ledger of a release of half a million tensors."""
    run = Run.at(root / "giant", "giant", "ckpt")
    draft = Draft("scan", "giant")
    draft.check("every tensor is accounted for", True)
    draft.metric("tensors", LEDGER_ROWS, "tensors")
    run.add(draft.close())
    connection = sqlite3.connect(run.directory / FILE)
    connection.execute(f"create table rows (id integer primary key, {', '.join(COLUMNS)})")
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(
        f"insert into rows ({', '.join(COLUMNS)}) values ({marks})", (_ledger_row(i) for i in range(LEDGER_ROWS))
    )
    connection.commit()
    connection.close()


def _ledger_row(index: int) -> tuple[object, ...]:
    layer, part = divmod(index, 5376)
    tensor = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{part}.w1.weight_packed"
    param = f"layers.{layer}.ffn.experts.{part % 896}.gate.weight"
    return tensor, f"model-{index % 96:05d}.safetensors", "U8", "3072 x 1792", 5505024, "consumed", param


def serve(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "firstlight.workbench", "dashboard", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("http"))
    try:
        yield line.split()[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


class Times(NamedTuple):
    """Seconds from asking for the page until something can be read on it, it is live, and its figure is drawn."""

    text_s: float
    live_s: float
    curves_s: float


def opened(browser: Any, url: str, word: str, curves: bool = False) -> Times:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    started_s = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.get_by_text(word).first.wait_for(timeout=60_000)
    text_s = time.perf_counter() - started_s
    page.wait_for_function(IS_LIVE, polling="raf", timeout=60_000)
    live_s = time.perf_counter() - started_s
    if curves:
        page.locator(".scatterlayer path.js-line, .gl-canvas").first.wait_for(state="attached", timeout=60_000)
    curves_s = time.perf_counter() - started_s
    context.close()
    return Times(text_s, live_s, curves_s)


def ten_a_second(root: Path, browser: Any, base: str, server: psutil.Process, seconds: float) -> str:
    """What 16 devices at 10 Hz cost, and how often the page shows something new."""
    run = Run.at(root / "busy", "busy", "ckpt")
    end = threading.Event()

    def feed(writer: EventWriter) -> None:
        began_s, tick = time.monotonic(), 0
        while not end.wait(max(0.0, began_s + 0.1 * tick - time.monotonic())):
            tick += 1
            for device in range(16):
                for metric in ("power", "utilisation", "memory_used", "temperature", "sm_clock", "pcie_sent"):
                    writer.put(reading(time.time(), f"gpu {device}", metric, 100.0 + tick + device))

    thread = threading.Thread(target=feed, args=(run.events,), daemon=True)
    thread.start()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{base}?run=busy&tab=Hardware")
    page.get_by_text("gpu 15").first.wait_for(timeout=30_000)
    page.wait_for_function(IS_LIVE, timeout=60_000)
    time.sleep(3.0)
    page.evaluate(COUNT_CHANGES)
    chrome = [one for one in psutil.Process().children(recursive=True) if "chrom" in one.name()]
    before_s, drawn_s, started_s = spent_s([server]), spent_s(chrome), time.perf_counter()
    first = page.evaluate("window.seen")
    time.sleep(seconds)
    took_s = time.perf_counter() - started_s
    share, browsers = (spent_s([server]) - before_s) / took_s, (spent_s(chrome) - drawn_s) / took_s
    updates = (page.evaluate("window.seen") - first) / took_s
    end.set()
    thread.join()
    run.close()
    page.close()
    return (
        f"16 devices x 6 metrics at 10 Hz: {updates:.1f} changes a second; {100 * share:.0f} % of one core in the"
        f" server, {100 * browsers:.0f} % in the browser, which draws without a GPU"
    )


def spent_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time so far, of those that live."""
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(process.cpu_times()[:2])
    return total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the ten updates a second are watched")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        root = Path(folder)
        a_day(root)
        a_ledger(root)
        started_s = time.perf_counter()
        follower = Follower(root / "day")
        follower.poll()
        ids = [series.id for series in follower.series()]
        span = follower.span()
        assert span is not None
        found = follower.history(ids, *span, 600)
        print(
            f"a day of {DEVICES} devices, {DAY_S * DEVICES:,} rows, read in {time.perf_counter() - started_s:.2f} s "
            f"({sum(map(len, found.values())):,} buckets)"
        )
        started_s = time.perf_counter()
        total, rows = LedgerFile.of(root / "giant").page("", "", 250_000, 200)
        print(f"a page of the ledger, {len(rows)} of {total:,} rows, in {time.perf_counter() - started_s:.3f} s")
        browser = play.chromium.launch(executable_path=BROWSER, args=[*ARGUMENTS, UNDRIVEN])
        for base, server in serve(root):
            opened(browser, f"{base}?run=day&tab=Hardware", "gpu 63", curves=True)  # a server's first page compiles
            for title, query, word, curves in (
                ("Overview", "?run=giant", "Ladder", False),
                ("a day of 64 devices, Hardware", "?run=day&tab=Hardware", "gpu 63", True),
                (f"a ledger of {LEDGER_ROWS:,} rows, Checkpoint", "?run=giant&tab=Checkpoint", "experts.0.gate", False),
            ):
                times = [opened(browser, base + query, word, curves) for _ in range(given.repeats)]
                text, live, drawn = (statistics.median(column) for column in zip(*times, strict=True))
                said = f", curves {drawn:.2f} s" if curves else ""
                least = min(one.curves_s if curves else one.text_s for one in times)
                print(f"{title}: first useful paint {text:.2f} s, live {live:.2f} s{said} (least {least:.2f})")
            print(ten_a_second(root, browser, base, server, given.seconds))
        browser.close()


if __name__ == "__main__":
    main()
