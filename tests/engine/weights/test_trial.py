"""Which way of reading is kept to, by what each was found to take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from firstlight.engine.weights.sources import trial
from firstlight.engine.weights.sources.local import LOCAL_SHAPE, LocalFiles


def test_gaps_are_read_or_left_out_whichever_is_sooner_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a disk was found to give, and never some of a kind this way and some that way."""
    now_s = 0.0
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now_s))
    gaps = trial.Gaps()
    assert gaps.verdict == ""
    gaps.begin("direct", 2_000_000_000)
    gaps.begin_rows(40_000)
    now_s = 1.0
    gaps.end("direct", 2_000_000_000)
    gaps.end_rows(40_000)
    assert "50 KB" in gaps.verdict
    for gap in (4096, 15_000, 48_000):
        gaps.begin("direct", 1 << 30)
        assert gaps.is_together("direct", 2048, 2048 + gap)
        gaps.end("direct", 0)
    for gap in (52_000, 120_000):
        gaps.begin_rows(100_000)
        assert not gaps.is_together("direct", 2048, 2048 + gap)
        gaps.end_rows(0)
    for gap in (15_000, 25_000):
        assert gaps.is_together("direct", 2048, 2048 + gap, False) == (gap < 20_000), "nothing is tried on trial"


def test_kinds_of_rows_have_a_way_out_of_the_page_cache_each() -> None:
    source = LocalFiles()
    for way, costs in (("together", 1.0), ("apart", 2.0)):
        source.rows(512, 4096).took(way, 8 << 20, costs)
        source.rows(2048, 16_384).took(way, 8 << 20, 1 / costs)
    assert source.rows(600, 5000).way() == "together"
    assert source.rows(2048, 16_384).way() == "apart"


def test_the_faster_way_is_found_by_trying_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads through the cache first, then past it; whichever took less time for as many bytes is kept to."""
    for cost, chosen in (({"buffered": 1.0, "direct": 0.5}, "direct"), ({"buffered": 1.0, "direct": 2.0}, "buffered")):
        ways = trial.Trial()
        now_s = 0.0
        for _ in range(200):
            method = ways.method()
            started_s, now_s = now_s, now_s + cost[method] * (8 << 20) / 1e9
            ways.took(method, 8 << 20, started_s, now_s)
        assert ways.method() == chosen
        assert "GB/s" in ways.verdict


def test_what_is_about_as_fast_is_tried_for_longer() -> None:
    """The first megabytes may mislead: memory is being provided, the disk has not begun to read ahead."""
    for at_first, later, chosen in ((1.2, 0.7, "direct"), (0.8, 1.0, "buffered")):
        ways, now_s, done = trial.Trial(), 0.0, 0
        while not ways.verdict:
            cost = 1.0 if ways.method() == "buffered" else at_first if done < 100 << 20 else later
            started_s, now_s, done = now_s, now_s + cost * (8 << 20) / 1e9, done + (8 << 20)
            ways.took(ways.method(), 8 << 20, started_s, now_s)
        assert ways.method() == chosen
        assert done < 1 << 30, "a trial ends"


def test_where_little_is_read_the_cache_serves_the_next_start() -> None:
    quick = trial.Trial()
    quick.took("buffered", 8 << 20, 0.0, 1.0)
    assert (quick.method(), quick.verdict) == ("buffered", "")


def test_a_few_bytes_that_are_waited_for_change_nothing_about_how_the_rest_is_read() -> None:
    source = LocalFiles()
    warm = source.shape
    source.usage.add("cached", 100 << 20)
    source.usage.add("buffered", 1 << 20)
    assert source.shape == warm
    source.usage.add("direct", 10 << 20)
    assert source.shape == LOCAL_SHAPE
    source.usage.add("cached", 10 << 30)
    assert source.shape == warm, "what is waited for no longer is forgotten"
    source.usage.add("buffered", 64 << 20)
    assert source.shape == LOCAL_SHAPE, "nor is a large share waited for of what there is much of"


def test_a_cold_source_is_read_by_many_at_once() -> None:
    source = LocalFiles()
    source.usage.add("buffered", 4096)
    assert source.shape == LOCAL_SHAPE
