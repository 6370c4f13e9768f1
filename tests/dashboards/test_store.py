"""What the pages show is read from run directories: as they are, as they grow, and nothing outside."""

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from firstlight.dashboards import figures, html
from firstlight.dashboards.app import Dashboard
from firstlight.dashboards.store import DataStore, Follower, requests_once
from firstlight.dashboards.views.communication import _slowest
from firstlight.dashboards.views.hardware import Sparks, devices
from firstlight.dashboards.views.memory import _kind
from firstlight.dashboards.views.overview import _engine
from firstlight.dashboards.views.view import not_yet
from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import Health
from firstlight.workbench.events import SERVED, ProgressEvent, RequestEvent
from firstlight.workbench.figures import COLOURS, SPARE
from firstlight.workbench.readings import Bucket, Reading, Series
from firstlight.workbench.report import Draft, Metric
from firstlight.workbench.runs import Run
from tests.waiting import until


def report(verb: str, passed: bool = True) -> Draft:
    draft = Draft(verb, "toy")
    draft.check("a check", passed)
    return draft


def reading(time_s: float, value: float | None, device: str = "gpu 0") -> Reading:
    reason = "" if value is not None else "NotSupported"
    return Reading(time_s=time_s, source="nvml", device=device, metric="power", unit="W", value=value, reason=reason)


def test_a_follower_sees_what_is_added_and_nothing_changes_without_news(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "a", "toy", "ckpt")
    follower = Follower(tmp_path / "a")
    follower.poll()
    first = follower.snapshot
    follower.poll()
    assert follower.snapshot is first
    run.add(report("scan").close())
    run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0, total=4.0, unit="B"))
    run.events.put(ProgressEvent(time_s=2.0, rung="load", phase="read", done=3.0, total=4.0, unit="B"))
    for time_s, value in ((2.0, 100.0), (2.5, 300.0), (4.0, None), (6.0, 300.0), (8.0, 400.0)):
        run.events.put(reading(time_s, value))
    assert run.events.flush()
    follower.poll()
    now = follower.snapshot
    assert now.version > first.version
    assert [one.verb for one in now.reports] == ["scan"]
    assert now.progress["load", "read"].rate == pytest.approx(2.0)
    trail = now.trails["nvml", "gpu 0", "power"]
    assert trail.times_s == (3.0, 5.0, 7.0)
    assert trail.values == (200.0, None, 300.0), "means over two seconds; where there was no value there is a gap"
    assert trail.last.value == 400.0
    assert first.reports == (), "what was handed out stays as it was"
    run.close()
    follower.close()


def test_a_follower_that_comes_late_shows_the_same(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.add(report("scan").close())
        run.add(report("plan", passed=False).close())
        early = Follower(tmp_path / "a")
        for tenth in range(3000):
            run.events.put(reading(tenth / 10, None if 2500 < tenth < 2600 else float(tenth)))
            if tenth % 700 == 0:
                assert run.events.flush()
                early.poll()
        assert run.events.flush()
        early.poll()
    late = Follower(tmp_path / "a")
    late.poll()
    assert len(late.snapshot.trails["nvml", "gpu 0", "power"].times_s) == 60, "two minutes, however often it was read"
    assert late.snapshot.reports == early.snapshot.reports
    assert late.snapshot.trails == early.snapshot.trails
    assert late.snapshot.latest("plan") is not None
    assert not late.snapshot.has_engine


def test_another_run_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.events.put(reading(1.0, 1.0, "gpu 7"))
        run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0))
        assert run.events.flush()
        follower = Follower(tmp_path / "a")
        follower.poll()
        assert {device for _, device, _ in follower.snapshot.trails} == {"gpu 7"}
    shutil.rmtree(tmp_path / "a")
    follower.poll_if_news()
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.events.put(reading(2.0, 2.0, "gpu 1"))
        assert run.events.flush()
        follower.poll()
    now = follower.snapshot
    assert {device for _, device, _ in now.trails} == {"gpu 1"}
    assert not now.progress
    follower.close()


def test_who_follows_is_told_of_every_change_and_asked_for_nothing_without(tmp_path: Path) -> None:
    told: list[int] = []
    store = DataStore(tmp_path).start()
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        follower = store.follow("a")
        follower.listen(lambda: told.append(follower.snapshot.readings_version))
        for count in range(1, 4):
            run.events.put(reading(float(count), 1.0))
            until(lambda count=count: told[-1:] >= [count], "it was not told")
        seen = len(told)
        time.sleep(0.3)
        assert len(told) == seen
    store.close()


def test_only_runs_below_the_root_can_be_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    Run.at(root / "inside", "toy", "ckpt")
    Run.at(tmp_path / "outside", "toy", "ckpt")
    (root / "rubbish").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    store = DataStore(root)
    assert [name for name, _ in store.runs()] == ["inside"]
    assert store.follow("inside").snapshot.record.model == "toy"
    for name in ("../outside", "..", ".", "", "/etc", "rubbish", "absent", str(tmp_path / "outside")):
        with pytest.raises(Refused, match="there is no run"):
            store.follow(name)
    store.close()


def a_run(root: Path, name: str) -> Path:
    """A run with two reports, and one event of each kind."""
    with Run.at(root / name, "toy", "ckpt") as run:
        run.add(report("scan").close())
        run.add(report("plan").close())
        run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0))
        run.events.put(reading(1.0, 100.0))
        run.events.put(RequestEvent(time_s=1.0, name="r", rung="infer", status="stop"))
    return root / name


def secret(root: Path) -> Path:
    """A report that lies beside the folder of runs."""
    path = root.parent / "secret.json"
    path.write_bytes(report("scan").close().to_json().replace(b"a check", b"a secret"))
    return path


def names_report(run: Path, file: str) -> None:
    record = json.loads((run / "run.json").read_text())
    record["rungs"][0]["file"] = file
    (run / "run.json").write_text(json.dumps(record))


def becomes(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


REPORTS: dict[str, Callable[[Path], object]] = {
    "half a report": lambda run: (run / "reports/01-scan.json").write_text("{"),
    "a number without a unit": lambda run: (run / "reports/01-scan.json").write_text(
        '{"title": "t", "verb": "scan", "status": "passed", "metrics": {"x": {"value": 5, "unit": ""}}}'
    ),
    "no report": lambda run: (run / "reports/01-scan.json").unlink(),
    "a pipe": lambda run: becomes(run / "reports/01-scan.json", os.mkfifo),
    "a link out": lambda run: becomes(run / "reports/01-scan.json", lambda p: p.symlink_to(secret(run.parent))),
    "a path out": lambda run: names_report(run, f"../../{secret(run.parent).name}"),
    "a path from the root": lambda run: names_report(run, str(secret(run.parent))),
    "no path": lambda run: names_report(run, "reports/\0"),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_that_cannot_be_read_is_said_and_the_others_are_shown(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "runs"
    REPORTS[kind](a_run(root, "a"))
    follower = DataStore(root).follow("a")
    scan, plan = follower.snapshot.reports
    assert (scan.verb, scan.status, plan.status) == ("scan", "refused", "passed")
    assert scan.findings
    assert "secret" not in str(scan.checks)
    assert len(follower.snapshot.trails) == 1
    follower.close()


def held(run: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(run / "events.sqlite", isolation_level=None)
    connection.execute("pragma locking_mode = exclusive")
    connection.execute("begin exclusive")
    return connection


def told(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / "events.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()


EVENTS: dict[str, Callable[[Path], object]] = {
    "noise": lambda run: (run / "events.sqlite").write_bytes(b"noise" * 4000),
    "a folder": lambda run: becomes(run / "events.sqlite", Path.mkdir),
    "a pipe": lambda run: becomes(run / "events.sqlite", os.mkfifo),
    "a link out": lambda run: becomes(
        run / "events.sqlite", lambda p: p.symlink_to(a_run(run.parent.parent, "other") / "events.sqlite")
    ),
    "held by somebody": held,
    "words for times": lambda run: told(run, "update progress set time_s = 'noon'"),
    "a reading of nothing": lambda run: told(run, "update readings set value = null"),
    "columns of another version": lambda run: told(run, "alter table requests rename column status to mood"),
}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("kind", EVENTS)
def test_events_that_cannot_be_read_are_said_and_cost_nothing_else(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "runs"
    holder = EVENTS[kind](a_run(root, "a"))
    follower = DataStore(root).follow("a")
    assert "events.sqlite cannot be read" in follower.snapshot.problem
    assert [one.status for one in follower.snapshot.reports] == ["passed", "passed"]
    assert follower.progress(("load",)) == [] or kind != "words for times"
    follower.look()
    page = Dashboard(DataStore(root), "a")
    page._choose()
    assert "events.sqlite cannot be read" in page._message.object
    page.close()
    follower.close()
    if isinstance(holder, sqlite3.Connection):
        holder.close()


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_tab_whose_tables_hold_something_else_says_so_and_the_others_are_drawn(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        profile = report("profile")
        profile.table("layers", [{"nothing": "of this version"}])
        run.add(profile.close())
    page = Dashboard(DataStore(tmp_path), "a")
    page._choose()
    said = {}
    for tab in page._tab.options:
        page._tab.value = tab
        said[tab] = page._message.object
    assert {tab for tab, text in said.items() if text} == {"Layers"}
    assert "Layers cannot be drawn" in said["Layers"]
    page.close()


def test_what_is_old_is_not_shown_as_of_now(tmp_path: Path) -> None:
    ready = Health(status="ready", stage="", running=0, waiting=0)
    for name, old_s in (("then", 600.0), ("just", 8.0), ("now", 0.0)):
        with Run.at(tmp_path / name, "toy", "ckpt") as run:
            busy = Reading(
                time_s=time.time() - old_s, source="engine", device="engine", metric="busy", unit="%", value=91
            )
            run.events.put(busy)
            assert run.events.flush()
            follower = Follower(run.directory)
            follower.poll()
            snapshot = msgspec.structs.replace(follower.snapshot, health=ready)
            follower.close()
        assert ("91" in _engine(snapshot)) == (name == "now"), name
        assert ("The last readings, of" in devices(snapshot, Sparks())) == (name == "then"), name


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_run_that_is_removed_while_it_is_open_is_missed_by_name(tmp_path: Path) -> None:
    for name in ("kept", "gone"):
        Run.at(tmp_path / name, "toy", "ckpt").close()
    page = Dashboard(DataStore(tmp_path), "gone")
    page._choose()
    assert page._run.value == "gone"
    assert not page._message.object
    shutil.rmtree(tmp_path / "gone")
    page._list_runs()
    assert page._run.value == "kept"
    assert html.said("There is no run 'gone' here") in page._message.object
    page.close()


def test_the_command_that_is_written_out_has_the_runs_own_mesh(tmp_path: Path) -> None:
    mesh = msgspec.to_builtins(Mesh(tp=2, attention="whole"))
    with Run.at(tmp_path / "a", "toy", "my ckpt"):
        pass
    follower = Follower(tmp_path / "a")
    record = msgspec.structs.replace(follower.snapshot.record, engine={"options": {"mesh": mesh}})
    snapshot = msgspec.structs.replace(follower.snapshot, record=record)
    place = f"{tmp_path.name}/a"
    expected = f"firstlight up 'my ckpt' --tp 2 --attention whole --run {place} --detached"
    written = not_yet(snapshot, "Live", "up", "--detached")
    assert html.said(expected) in re.sub(r'<span class="whole">(--\w+)</span>', r"\1", written)
    assert "--tp" not in not_yet(snapshot, "Checkpoint", "scan")
    follower.close()


def test_ranks_have_a_scale_of_their_own_beside_the_machine() -> None:
    def kind(source: str, metric: str, unit: str = "B") -> str:
        return _kind(Series(id=1, source=source, device="x", metric=metric, unit=unit))

    assert kind("memory", "resident") == kind("torch", "reserved") == "ranks"
    assert kind("host", "memory_used") == kind("nvml", "memory_used") == "whole devices"
    assert kind("memory", "cache_bytes") == "by role"
    assert kind("host", "memory_used", "%") == kind("disk", "read") == ""


def test_folders_that_are_no_runs_are_left_out_with_the_reason(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    a_run(root, "good")
    (root / "empty").mkdir()
    (root / "away").symlink_to(a_run(tmp_path, "other"))
    for name, make in (
        ("half", lambda p: p.write_text("{")),
        ("pipe", os.mkfifo),
        ("list", lambda p: p.write_text("[]")),
    ):
        (root / name).mkdir()
        make(root / name / "run.json")
    store = DataStore(root)
    assert [name for name, _ in store.runs()] == ["good"]
    assert store.left_out.keys() == {"away", "half", "pipe", "list"}
    for name in ("away", "pipe", "half", "good/../good", "\0"):
        with pytest.raises(Refused):
            store.follow(name)


def test_an_engine_handle_of_another_kind_is_no_engine(tmp_path: Path) -> None:
    for name, text in (("half", "{"), ("list", "[]"), ("types", '{"url": 5, "pids": "x"}')):
        folder = a_run(tmp_path, name) / "engine"
        folder.mkdir()
        (folder / "host.json").write_text(text)
        follower = DataStore(tmp_path).follow(name)
        follower.look()
        assert follower.snapshot.health is None
        follower.close()


def test_text_from_outside_is_escaped_wherever_it_stands() -> None:
    evil = "<b>\u202ex</b>"
    pieces = (
        html.table([{evil: evil}]),
        html.card(evil, ""),
        html.figures([(evil, evil)]),
        html.stacked([(evil, {evil: 1.0}, evil)]),
        html.nothing(evil),
        str(figures.layer_bars([{"rank": 0, "block": evil, "decode_ms": 1.0}], "decode")["data"][0]["hovertext"]),
    )
    for piece in pieces:
        assert "<b>\u202e" not in piece
        assert "&lt;b&gt;" in piece


def test_curves_break_where_nothing_was_read() -> None:
    buckets = [Bucket(float(t), 1, 1.0, 1.0, 1.0, 0) for t in (*range(10), *range(60, 70))]
    (line,) = figures.curves({"gpu 0": buckets}, "W")["data"]
    assert line["y"].count(None) == 1
    assert len(line["y"]) == 21


def test_what_reaches_beyond_its_block_is_overlapped() -> None:
    def row(kind: str, start: float, long: float) -> dict[str, object]:
        return {
            "phase": "decode",
            "rank": 0,
            "name": kind,
            "kind": kind,
            "start_ms": start,
            "duration_ms": long,
            "moved_bytes": 8,
        }

    inside = [row("compute", 0.0, 10.0), row("collective", 4.0, 2.0)]
    (found,) = figures.overlap(inside, "decode")
    assert (found["collective_ms"], found["overlapped"]) == (2.0, 0.0)
    beyond = [row("compute", 0.0, 10.0), row("compute", 10.0, 10.0), row("collective", 8.0, 8.0)]
    (found,) = figures.overlap(beyond, "decode")
    assert found["overlapped"] == pytest.approx(75.0)


def test_a_receive_waits_and_is_no_link_and_many_names_are_thinned() -> None:
    rows = [
        {"phase": "decode", "rank": 1, "name": name, "kind": "collective", "start_ms": 0.0, "duration_ms": ms}
        | {"moved_bytes": 2**20}
        for name, ms in (("receive pp", 900.0), ("send pp", 1.0))
    ]
    shown = _slowest(rows, "decode")
    assert "1000.0 MiB/s" in shown
    assert shown.count("MiB/s") == 1
    for count, written in ((16, None), (30, 15), (93, 16)):
        blocks = [{"block": f"layers.{index}.mixer", "rank": 0, "decode_ms": 1.0} for index in range(count)]
        axis = figures.layer_bars(blocks, "decode")["layout"]["xaxis"]
        assert len(axis.get("tickvals", ())) == (written or 0)


def test_figures_stand_in_their_own_unit() -> None:
    shares = {"overlapped": 75.0, "decode_of_limit": 6.5, "share_of_limit": 0.25}
    shown = html.table([shares | {"waited_s": 8.5e-6, "rate_bytes_per_s": 2.0**20}])
    for expected in (">75 %<", ">6.5 %<", ">25 %<", ">waited (µs)<", ">8.5<", ">1.00 MiB/s<"):
        assert expected in shown, expected


def test_numbers_of_a_column_stand_under_each_other_and_in_full_in_their_titles() -> None:
    def column(name: str, *values: float | None) -> list[str]:
        return re.findall(r'<td class="n"[^>]*>([^<]*)<', html.table([{name: value} for value in values]))

    assert column("decode_ms", 2.5938, 3.8, 0.069172) == ["2.594", "3.800", "0.069"]
    assert column("total_s", 1.30812, 0.6339) == ["1.308", "0.634"]
    assert column("first_token_s", 0.4202, 0.0211, None) == ["420.2", "21.1", ""], "milliseconds"
    assert column("floor", 6.1349e-7, 0.0, 1e-4) == ["6.13e-07", "0", "1.00e-04"]
    assert column("kl", 0.25, 1e-9) == ["0.25", "1e-09"], "none is lost in the rounding of another"
    assert column("share_of_limit", 0.1553, 0.151, 0.1085) == ["15.53 %", "15.10 %", "10.85 %"]
    assert html.table([{"x": f"{'long ' * 9}20 (0.000) a.b.0.w"}]).count("<wbr>") == 3, "names are broken, not numbers"
    assert column("count", 146, 8_758_016) == ["146", "8,758,016"]
    assert 'title="2.5938"' in html.table([{"decode_ms": 2.5938}, {"decode_ms": 123.4}])


def test_a_roofline_places_blocks_by_what_they_make_of_a_byte() -> None:
    row = {"block": "layers.0.ffn", "rank": 0, "weight_bytes": 1000, "decode_flops": 2000, "prefill_flops": 256_000}
    figure = figures.roofline([row | {"decode_ms": 1.0, "prefill_ms": 2.0}], 5e9)
    assert figure is not None
    decode, prefill, limit = figure["data"]
    assert (decode["x"], decode["y"]) == ([2.0], [0.002])
    assert (prefill["x"], prefill["y"]) == ([256.0], [0.128])
    assert [y / x for x, y in zip(limit["x"], limit["y"], strict=True)] == pytest.approx([5.0, 5.0])
    assert figures.roofline([row | {"decode_ms": None}], 5e9) is None


def test_figures_of_one_name_are_told_apart() -> None:
    found = {"read_bytes": Metric(value=2**20, unit="B"), "read_s": Metric(value=0.0213, unit="s")}
    shown = html.metrics(found)
    for expected in (">1.00 MiB<", ">read bytes<", ">21.3 ms<", ">read time<"):
        assert expected in shown, expected


def test_every_colour_stands_out_from_light_and_dark() -> None:
    """WCAG 2.1: text 4.5 to 1 (1.4.3), lines and bars 3 to 1 (1.4.11), on the ground that they stand on."""

    def luminance(colour: str) -> float:
        colour = colour if len(colour) == 7 else "#" + "".join(2 * one for one in colour[1:])
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return sum(share * one for share, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    style = resources.files("firstlight.dashboards").joinpath("style/colours.css").read_text(encoding="utf-8")
    drawn = [one for one in (*COLOURS.values(), *SPARE, figures.LIMIT) if one.startswith("#")]
    for line in style.splitlines():
        named = dict(re.findall(r"--fl-([a-z]+): (#[0-9a-f]+)", line))
        for word in ("text", "quiet", "accent", "good", "bad", "warn"):
            for ground in ("ground", "card"):
                assert contrast(named[word], named[ground]) >= 4.5, (word, ground, line)
        assert contrast(named["accent"], named["wash"]) >= 4.5
        for colour in drawn:
            assert contrast(colour, named["card"]) >= 3.0, (colour, line)


def test_a_request_that_a_rung_recorded_is_not_shown_twice() -> None:
    def event(time_s: float, name: str, rung: str, number: int, prompt: int = 7) -> RequestEvent:
        record = f'{{"number": {number}}}'
        return RequestEvent(time_s=time_s, name=name, rung=rung, status="stop", prompt_tokens=prompt, record=record)

    found = [
        event(100.0, "cat.png", "infer", 3),
        event(100.4, "request 3", SERVED, 3),
        event(101.0, "request 4", SERVED, 4),
        event(900.0, "request 3", SERVED, 3),  # of an engine that was started later
    ]
    assert [(one.time_s, one.name) for one in requests_once(found)] == [
        (900.0, "request 3"), (101.0, "request 4"), (100.0, "cat.png"),
    ]  # fmt: skip


def test_a_small_curve_breaks_where_nothing_was_read_and_where_there_was_no_value() -> None:
    times = [1.0, 3.0, 5.0, 41.0, 43.0, 45.0]
    path = html.curve(times, [1.0, 2.0, 3.0, 4.0, None, 6.0], 120.0)
    assert [piece[0] for piece in path.split() if piece[0] in "ML"] == ["M", "L", "L", "M", "M"]
    assert html.curve((), (), 120.0) == ""
