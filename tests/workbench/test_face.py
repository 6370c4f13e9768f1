"""What a person at a terminal sees, at the width of the terminal."""

import pytest

from firstlight.engine.findings import fatal
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.face import Face, LiveView, pace_words, say_refused
from firstlight.workbench.ladder import HIGHLIGHTS, _tell, highlights
from firstlight.workbench.progress import Pace
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import LADDER


def event(done: float, total: float | None, time_s: float) -> ProgressEvent:
    return ProgressEvent(time_s=time_s, rung="load", phase="read weights", done=done, total=total, unit="B")


def test_pace_in_words() -> None:
    half = pace_words(Pace(event(0, 4 << 20, 0.0), event(2 << 20, 4 << 20, 2.0)))
    assert half == ("━" * 8 + "─" * 8 + "  50 %", "2.0 s to go ", "1.00 MiB/s", "of 4.00 MiB")
    assert pace_words(Pace(event(0, 100, 0.0), event(100, 100, 1.0)))[1].strip() == "done"
    assert pace_words(Pace(event(0, None, 0.0), event(512, None, 1.0))) == ("512 B", "512 B/s")
    assert pace_words(Pace(event(0, None, 0.0), event(0, None, 0.0))) == ("", "")


def test_the_live_view_shows_the_last_phases() -> None:
    view = LiveView()
    for number in range(9):
        view._phases[("load", f"phase {number}")] = Pace(event(0, 10, 0.0), event(5, 10, 1.0))
    lines = view._render().plain.splitlines()
    assert [line.split()[2] for line in lines] == ["3", "4", "5", "6", "7", "8"]
    assert all("50 %" in line and "1.0 s to go" in line for line in lines)


def test_progress_is_not_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    face = Face()
    face.progress(event(1, 10, 0.0))
    face.settle()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [50, 80, 200])
def test_refusals_are_wrapped_and_counted(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    findings = [
        fatal("missing-shard", f"shard {n} is " + "not there " * 12, file=f"s{n}", expected="a file", next="fetch it")
        for n in range(7)
    ]
    say_refused(findings)
    err = capsys.readouterr().err
    assert max(map(len, err.splitlines())) <= min(width, 120)
    assert err.count("refused: ") == 5
    assert "and 2 more; --json FILE writes all" in err
    assert "  next      fetch it" in err


def test_a_paragraph_is_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    Face().paragraph("failed: " + "Four frogs on a yellow background. " * 4, indent=10)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 10) for line in lines)
    assert " ".join(" ".join(lines).split()) == "failed: " + ("Four frogs on a yellow background. " * 4).strip()


def test_a_verdict_is_one_line_and_what_is_too_long_for_it_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    Face().verdict("passed", "verify", "30/30", "17.4 s", "a long line of figures " * 5)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("passed   verify       17.4 s     30/30  a long line")
    assert all(len(line) <= 60 and line.startswith(" " * 40) for line in others)
    assert " ".join([first[40:], *(line.strip() for line in others)]) == ("a long line of figures " * 5).strip()
    Face().verdict("passed", "plan", "1/1", "0.1 s", "short")
    assert capsys.readouterr().out.splitlines() == ["passed   plan          0.1 s       1/1  short"]
    monkeypatch.setenv("COLUMNS", "40")
    Face().verdict("passed", "scan", "5/5", "0.078 s", "3,091,904 parameters, 5.90 MiB")
    assert capsys.readouterr().out.splitlines() == [
        "passed   scan        0.078 s       5/5", "          3,091,904 parameters, 5.90 MiB",
    ]  # fmt: skip
    Face(quiet=True).verdict("passed", "verify", "", "", "")
    assert capsys.readouterr().out == ""


def test_an_answer_that_was_not_expected_is_shown_with_what_was(capsys: pytest.CaptureFixture[str]) -> None:
    draft = Draft("infer", "m")
    rows = [("cat.png", "A cat.", "a cat"), *[("", "Moo.", None)] * 6, ("lion.jpg", "No.", "Yes."), ("", "Oh.", None)]
    rows[1] = ("", "Moo. " * 20, None)
    draft.table("answers", [{"picture": p or None, "question": "So?", "answer": a, "expected": e} for p, a, e in rows])
    _tell(Face(), draft.close())
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        "cat.png: So?  A cat.",
        f"So?  {('Moo. ' * 20)[:59]}…",
        *["So?  Moo."] * 4,
        "lion.jpg: So?  No.  (expected: Yes.)",
    ]


def test_figures_of_a_line_are_found_under_any_prefix() -> None:
    draft = Draft("verify", "m")
    assert highlights(draft.close()) == ""
    draft.metric("prompt_logits_max_abs", 1e-6, "logits")
    draft.metric("random_logits_max_abs", 2e-6, "logits")
    draft.metric("prompt_kl_mean", 1e-9, "nat")
    assert highlights(draft.close()) == "1e-06 logits, KL 1e-09 nat"
    assert set(HIGHLIGHTS) == set(LADDER)
