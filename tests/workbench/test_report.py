"""A report keeps its promises: no NaN literals, numbers with units, all escaped, nothing wider than the screen."""

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.findings import fatal, note, warning
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.stream import EngineFailed
from firstlight.engine.weights.files.safetensors_file import write as save
from firstlight.workbench import figures
from firstlight.workbench.face import Face, say_refused
from firstlight.workbench.faults import report_of
from firstlight.workbench.render.html import ON_DARK, ON_LIGHT, report_html, table_html
from firstlight.workbench.render.terminal import joined, report_text
from firstlight.workbench.render.words import cell, harmless, heading, in_bytes, quantity, seconds, titles
from firstlight.workbench.report import Draft, Metric, Report, finite, refusal, write_atomically


def full_report() -> Report:
    draft = Draft("scan", "a <model> & more")
    draft.check("all is well", True, value=3, limit=4, unit="tensors")
    draft.check("a long question that goes on and on until the line is full", False, value="x" * 90, detail="y " * 60)
    draft.check("left out", None, detail="not asked")
    draft.metric("parameters", 1_026_408_232_448, "parameters")
    draft.metric("rate", None, "B/s", "nothing was read")
    draft.table(
        "ranks",
        [{"rank": i, **{f"role{j}_bytes": 10**9 + (j << 20) + (i << 24) for j in range(14)}} for i in range(40)],
    )
    draft.table("odd", [{"a": 1, "b": None}, {"c": "<script>"}])
    draft.find(
        warning("stale-index", "the index is stale", file="index.json", expected="new", found="old", next="mend")
    )
    draft.find(fatal("missing-shard", "a shard is missing", tensors=tuple(f"t.{i}" for i in range(9))))
    return draft.close()


def test_status_follows_from_checks_and_findings() -> None:
    draft = Draft("scan", "m")
    draft.check("fine", True)
    draft.check("skipped", None)
    draft.find([note("tied-head", "tied"), warning("stale-index", "stale")])
    assert draft.close().status == "passed"
    draft.find(fatal("missing-shard", "gone"))
    assert draft.close().status == "failed"
    assert [f.severity for f in draft.close().findings] == ["fatal", "warning", "note"]
    draft = Draft("scan", "m")
    draft.check("not fine", False)
    assert draft.close().status == "failed"
    assert draft.close("refused").exit_status == 2


def test_json_has_the_fields_of_the_contract_and_reads_back() -> None:
    report = full_report()
    plain = json.loads(report.to_json())
    assert set(plain) >= {
        "title",
        "verb",
        "status",
        "checks",
        "findings",
        "metrics",
        "tables",
        "environment",
        "started",
    }
    assert set(plain["checks"][0]) == {"name", "status", "value", "limit", "unit", "detail"}
    assert set(plain["findings"][0]) == {"code", "severity", "message", "file", "tensors", "expected", "found", "next"}
    assert plain["metrics"]["parameters"] == {"value": 1_026_408_232_448, "unit": "parameters"}
    assert all(set(metric) == {"value", "unit"} for metric in plain["metrics"].values())
    assert plain["duration_s"] >= 0
    assert {"versions", "cpu", "commit"} <= set(plain["environment"])


def test_report_survives_its_file(tmp_path: Path) -> None:
    report = full_report()
    assert Report.read(report.write(tmp_path / "r.json")) == report


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(Refused, match="not a report"):
        Report.read(tmp_path / "r.json")


@pytest.mark.parametrize("given_", [{"value": 3}, {"value": "x", "limit": 0.5}])
def test_a_number_has_a_unit(given_: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="needs a unit"):
        Draft("scan", "a").check("is it", True, **given_)
    with pytest.raises(AssertionError, match="needs a unit"):
        Metric(value=0.5, unit="")


def test_names_that_are_no_text_are_spelt_out() -> None:
    name = os.fsdecode(b"a\xff.safetensors")
    draft = Draft("scan", name)
    draft.find(warning("trailing-bytes", name, file=name, tensors=(name,)))
    draft.table("files", [{name: Path(name)}])
    plain = json.loads(draft.close().to_json())
    spelt = "a\\udcff.safetensors"
    assert (plain["title"], plain["findings"][0]["file"], plain["findings"][0]["tensors"]) == (spelt, spelt, [spelt])
    assert plain["tables"]["files"] == [{spelt: spelt}]


def test_the_fields_are_the_contract_and_no_more() -> None:
    fields = {"title", "verb", "status", "checks", "findings", "metrics", "tables", "environment", "started"}
    report = full_report()
    assert set(json.loads(report.to_json())) == fields | {"duration_s"}
    forced = msgspec.structs.replace(report, forced=True)
    assert set(json.loads(forced.to_json())) == fields | {"duration_s", "forced"}


def test_tensors_that_a_finding_only_counts_are_said() -> None:
    draft = Draft("scan", "m")
    draft.find(fatal("missing-tensor", "many", tensors=("a", "b"), more_tensors=1998, next="n"))
    report = draft.close()
    assert json.loads(report.to_json())["findings"][0]["more_tensors"] == 1998
    assert "a, b and 1,998 more" in str(report)


def test_nan_and_infinity_become_null_and_are_said() -> None:
    draft = Draft("verify", "m")
    draft.check("close", False, value=float("nan"), limit=1e-3, unit="of scale", detail="layer 3")
    draft.metric("kl", float("inf"), "nat")
    draft.table("layers", [{"error": float("-inf"), "other": np.float32("nan")}])
    text = draft.close().to_json().decode()
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"literal {name}"))
    assert plain["checks"][0]["value"] is None
    assert plain["checks"][0]["detail"] == "layer 3; value is nan"
    assert plain["metrics"]["kl"] == {"value": None, "unit": "nat"}
    assert plain["tables"]["metric_details"] == [{"metric": "kl", "detail": "value is inf"}]
    assert plain["tables"]["layers"] == [{"error": None, "other": None}]


scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(values)
def test_finite_data_is_json_whatever_it_was(value: object) -> None:
    json.loads(json.dumps(finite(value)), parse_constant=lambda name: pytest.fail(name))


def test_a_number_without_a_unit_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        Metric(value=3, unit="")
    Metric(value="a name", unit="")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_terminal_text_keeps_within_the_width(width: int) -> None:
    lines = report_text(full_report(), width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text, "numbers and words are wrapped, never cut"
    assert lines[-1].startswith("failed  scan  a <model> & more  2 of 3 checks")
    assert "and 16 more rows in the JSON report" in text
    assert "t.0, t.1, t.2, t.3 and 5 more" in " ".join(text.split())


def test_limits_go_below_where_there_is_no_room_beside_the_values() -> None:
    draft = Draft("verify", "m")
    draft.check("answers are neither empty, loops nor gibberish", True, value=0, limit=0, unit="problems")
    draft.check("hidden.1", True, value=5.816e-07, limit=1e-4, unit="of scale", detail="max-abs 4.77e-07")
    draft.check("drawn", True, value=0.0, limit=0.6, unit="share")
    first = "passed answers are neither empty, loops nor gibberish 0 problems"
    second, third = "passed hidden.1 5.816e-07 of scale", "max-abs 4.77e-07"
    for width, shown in (
        (120, [f"{first} limit 0", f"{second} limit 0.0001 {third}", "passed drawn 0 % limit 60 %"]),
        (80, [first, "limit 0", second, f"limit 0.0001; {third}", "passed drawn 0 %", "limit 60 %"]),
    ):
        lines = report_text(draft.close(), width).splitlines()
        assert [" ".join(line.split()) for line in lines[lines.index("checks") + 1 : -2]] == shown


def test_a_hash_leaves_room_for_the_names() -> None:
    draft = Draft("export", "m")
    draft.metric("archive_sha256", "0123456789abcdef" * 4, "")
    draft.metric("archive_bytes", 25_903, "B", "14 files")
    draft.check("it", True)
    lines = report_text(draft.close(), 80).splitlines()
    assert [" ".join(line.split()) for line in lines if "archive" in line][:1] == ["archive 25.30 KiB 14 files"]
    assert "…" not in "".join(lines)
    assert "0123456789abcdef" * 4 in "".join("".join(lines[lines.index("figures") :]).split())


def test_wide_tables_go_on_below_with_their_first_column() -> None:
    text = report_text(full_report(), 80)
    heads = [line.split() for line in text.splitlines() if line.strip().startswith("rank")]
    shown = [word for head in heads for word in head if word.startswith("role")]
    assert shown == [f"role{j}" for j in range(14)]
    assert len(heads) > 2
    draft = Draft("profile", "m")
    blocks = [{"rank": rank, "block": f"layers.{i}"} for rank in range(2) for i in range(10)]
    draft.table("layers", [row | {f"time{j}_ms": 1.5 * j for j in range(9)} for row in blocks])
    heads = [line.split()[:2] for line in report_text(draft.close(), 80).splitlines() if "(ms)" in line]
    assert heads == [["rank", "block"]] * len(heads), "as many columns are repeated as tell the rows apart"
    assert len(heads) > 1


def test_ranks_that_say_the_same_stand_together_and_a_few_wide_rows_are_turned() -> None:
    at = [(rank // 4, rank % 4) for rank in range(8)]
    rows = [
        {"rank": i, "pp": pp, "tp": tp, **dict.fromkeys("abcdefghijkl", 123456 + pp)} for i, (pp, tp) in enumerate(at)
    ]
    draft = Draft("plan", "m")
    draft.table("ranks", rows)
    shown = [line.split("  ") for line in report_text(draft.close(), 80).splitlines() if line.startswith("  ")]
    lines = {first.strip(): [word.strip() for word in rest if word] for _, first, *rest in shown}
    assert lines["rank"] == ["0 to 3", "4 to 7"]
    assert (lines["pp"], lines["tp"]) == (["0", "1"], ["0 to 3"] * 2)
    assert all(lines[name] == ["123,456", "123,457"] for name in "abcdefghijkl")
    assert joined([{"rank": 0, "tp": 0, "a": 1}, {"rank": 2, "tp": 0, "a": 1}]) == [{"rank": "0, 2", "tp": 0, "a": 1}]


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_escaped_and_closed() -> None:
    html = report_html(full_report())
    outline = Outline()
    outline.feed(html)
    assert not outline.open
    assert "script" not in outline.seen
    assert "&lt;script&gt;" in html
    assert "a &lt;model&gt; &amp; more" in html
    assert full_report()._repr_html_().startswith('<div class="firstlight">')


def test_html_names_no_colour_that_one_theme_hides() -> None:
    """Text takes the page's colour; verdicts have one for either ground, and a live figure its own: 4.5 to 1 each."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    grounds = {"#ffffff": ON_LIGHT, "#111111": ON_DARK, "#1e1e1e": ON_DARK}  # white, JupyterLab's, VS Code's
    for ground, colours in grounds.items():
        assert {word: colour for word, colour in colours.items() if contrast(colour, ground) < 4.5} == {}, ground
    pages = report_html(full_report()) + figures.STYLE
    assert re.findall(r"[{;]color:(?!inherit|var\(--fl-)[^;}]*", pages) == [], "a colour that no theme chooses"
    assert set(re.findall(r"var\(--fl-(\w+)\)", pages)) <= set(ON_LIGHT) == set(ON_DARK)
    layout = figures.step_split([]).figure().layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "#ffffff"
    assert contrast(layout.font.color, layout.paper_bgcolor) >= 4.5
    drawn = [colour for colour in (*figures.COLOURS.values(), *figures.SPARE) if colour.startswith("#")]
    assert [colour for colour in drawn if contrast(colour, layout.plot_bgcolor) < 3] == []


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "B", "none"),
        (True, "", "yes"),
        (0, "B", "0 B"),
        (1536, "B", "1.50 KiB"),
        (151_397_597_184, "B", "141.0 GiB"),
        (1, "shards", "1 shard"),
        (2, "shards", "2 shards"),
        (1, "s", "1 s"),
        (0.02259, "s", "22.59 ms"),
        (1.569e-05, "s", "15.69 µs"),
        (0.6, "share", "60 %"),
        (0.00123456, "of scale", "0.001235 of scale"),
        (123456.7, "tokens/s", "123,457 tokens/s"),
    ],
)
def test_quantities_read_well(value: object, unit: str, words: str) -> None:
    assert quantity(value, unit) == words


def test_numbers_of_a_column_of_a_notebook_have_as_many_decimals() -> None:
    rows = [{"rank": 0, "done_s": 0.01034, "share_of_limit": 0.2324, "rate_bytes_per_s": 2.0**20}]
    rows += [{"rank": 1, "done_s": 0.0113, "share_of_limit": 0.377, "rate_bytes_per_s": None}]
    shown = table_html(rows)
    assert re.findall(r"<th[^>]*>([^<]*)<", shown) == ["rank", "done (ms)", "share of limit", "rate"]
    assert re.findall(r"<td[^>]*>([^<]*)<", shown) == [
        "0", "10.34", "23.24 %", "1.00 MiB/s", "1", "11.30", "37.70 %", "",
    ]  # fmt: skip


def test_columns_say_their_unit() -> None:
    assert heading("weight_bytes") == "weight"
    assert heading("step_ms") == "step (ms)"
    assert titles({"step_ms": "ms", "read_bytes": "B", "read_s": "s"}) == ["step", "read bytes", "read time"]
    assert heading("tokens_per_s") == "tokens per s"
    assert cell("weight_bytes", 2048) == cell("bytes", 2048) == "2.00 KiB"
    assert [heading(name) for name in ("bytes", "share_of_bytes")] == ["bytes", "share of bytes"]
    assert [cell(name, 0.25) for name in ("share_of_bytes", "decode_of_limit")] == ["25 %", "0.25 %"]
    assert cell("ids", [1, 2]) == "1, 2"
    assert in_bytes(1023) == "1,023 B"
    assert (seconds(0.0123), seconds(12.34), seconds(200), seconds(7500)) == (
        "0.012 s",
        "12.3 s",
        "3 min 20 s",
        "2 h 05 min",
    )


def test_errors_become_reports() -> None:
    refused = report_of("load", "m", Refused(fatal("missing-shard", "gone")))
    assert (refused.status, refused.exit_status) == ("refused", 2)
    assert refusal("load", "m", Refused(fatal("missing-shard", "gone"))).findings == refused.findings
    lost = report_of("start", "m", RankFailure(1, "load", "was killed"))
    assert lost.status == "failed"
    assert "rank 1" in lost.findings[0].message
    known = report_of("start", "m", RankFailure(1, "load", "was killed", "/runs/a/engine/rank1.log")).findings[0]
    assert (known.file, str(known.next)) == (
        "/runs/a/engine/rank1.log",
        "look at /runs/a/engine/rank1.log; start again",
    )
    watcher = Failure(rank=None, phase="watch", reason="the supervisor ended")
    for ended in (RankFailure(None, "watch", "it ended"), EngineFailed(str(watcher), watcher)):
        found = report_of("infer", "m", ended)
        assert (found.status, found.findings[-1].code) == ("failed", "engine-failed")
        assert "rank" not in str(found.findings[-1]).partition("next:")[0], "none is to blame"
    system = report_of("load", "m", FileNotFoundError(2, "No such file or directory", "x.bin"))
    assert (system.status, system.findings[0].file) == ("refused", "x.bin")


def test_a_fault_of_ours_leaves_its_traceback_in_a_file() -> None:
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        report = report_of("scan", "m", error)
    assert report.status == "failed"
    assert report.findings[0].code == "internal-fault"
    file = report.findings[0].file
    assert file is not None
    assert "raise ZeroDivisionError" in Path(file).read_text()
    Path(file).unlink()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be written") as absent:
        write_atomically(tmp_path / "absent" / "r.json", b"x")
    assert absent.value.findings[0].code == "not-found"
    with pytest.raises(Refused, match="/dev/full cannot be written") as full:
        write_atomically("/dev/full", b"x")
    assert (full.value.findings[0].code, full.value.findings[0].expected) == ("not-available", "room for 1 bytes")
    assert "make room" in str(full.value.findings[0].next)
    assert report_of("scan", "m", OSError(errno.ENOSPC, "full", "x.tmp")).findings[0].code == "not-available"
    assert write_atomically(tmp_path / "r.json", b"x").read_bytes() == b"x"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


COMMANDS = "\x1b[2J\x9b31m\u202e\u2066\x07\r"


def hostile_report() -> Report:
    """Every text that a checkpoint, a file name or a model may have written commands the terminal."""
    draft = Draft("scan", f"title{COMMANDS}")
    draft.check(f"check{COMMANDS}", False, value=f"value{COMMANDS}", detail=f"detail{COMMANDS}")
    draft.metric("metric", f"{COMMANDS}", "", f"of{COMMANDS}")
    draft.table(f"table{COMMANDS}", [{f"column{COMMANDS}": f"cell{COMMANDS}", "list": [COMMANDS]}])
    fields = {"file": f"f{COMMANDS}", "expected": f"e{COMMANDS}", "found": COMMANDS, "next": f"n{COMMANDS}"}
    draft.find(fatal("missing-shard", f"message{COMMANDS}", tensors=(f"t{COMMANDS}",), **fields))
    return draft.close()


def test_no_name_commands_the_terminal_or_turns_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    report = hostile_report()
    face = Face()
    face.report(report)
    face.brief(report)
    face.text(f"answer{COMMANDS}\n\tإجابة")
    face.aside(f"aside{COMMANDS}")
    face.verdict("failed", "scan", "0 of 1", "1 s", f"figures{COMMANDS}")
    say_refused(report.findings)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, report_text(report), report_html(report)):
        assert not {char for char in COMMANDS if not char.isprintable()} & set(text), ascii(text)
        assert "\\x1b" in text
    assert "\n\tإجابة" in shown.out


def test_an_answer_keeps_its_own_characters() -> None:
    assert harmless("a\r\nb\tc إجابة 👩\u200d🚀") == "a\nb\tc إجابة 👩\u200d🚀"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Nor is a device: `--json /dev/null` once took the place of the device itself."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(2) as pool:
        for write in (lambda: write_atomically(pipe, b"x"), lambda: save(pipe, {"a": np.zeros(2)})):
            written = pool.submit(write)
            assert pipe.read_bytes()
            written.result(10)
            assert pipe.is_fifo()
