"""The ladder on a real model over two ranks: by hand in a session, at once by `up`, and what a broken model does."""

import json
import os
import shutil
import signal
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.request import Completion, Delta, SamplingParams
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.bringup import Bringup
from firstlight.workbench.cli import main
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.infer import DRAWN, Question, drawn, infer
from firstlight.workbench.report import Report
from firstlight.workbench.runs import Run
from tests.waiting import alive, gone

SAMPLES = Path(__file__).parents[2] / "data" / "samples"
MENAGERIE = SAMPLES / "menagerie"
CAT = SAMPLES / "pictures" / "cat.png"
QUESTION = "What animal is this?"


def failed(report: Report) -> list[str]:
    return [f"{c.name}: {c.value} {c.detail}" for c in report.checks if c.status == "failed"]


@pytest.fixture(scope="module")
def bringup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bringup]:
    """The first rungs climbed on two ranks, the engine running."""
    root = tmp_path_factory.mktemp("runs")
    with Bringup(MENAGERIE, tp=2, root=root, max_context=256, force=True) as session:  # tests stand on their own
        for report in (session.scan(), session.plan(), session.load(), session.start()):
            assert report.passed, (report.verb, failed(report), report.findings)
        yield session
        assert session.host is not None
        pids = session.host.pids
        assert len(alive(pids)) == 2
    gone(pids, "closing a session ends its ranks")


def test_start_tells_stages_memory_and_operators(bringup: Bringup) -> None:
    report = bringup.run.latest("start")
    assert report is not None
    stages = {check.name for check in report.checks if check.name.startswith("stage ")}
    assert {
        "stage mesh",
        "stage ping",
        "stage ledger",
        "stage load",
        "stage warm-up text",
        "stage warm-up image",
    } <= stages
    assert [row["rank"] for row in report.tables["memory"]] == [0, 1]
    assert all(row["vision_bytes"] > 0 and row["cache_bytes"] > 0 for row in report.tables["memory"])
    assert {"attention", "linear"} <= {row["operator"] for row in report.tables["operators"]}
    assert str(report.value("url")).startswith("http://127.0.0.1:")
    plan = bringup.run.latest("plan")
    assert plan is not None
    held = [row["head_bytes"] for row in report.tables["memory"]]
    assert held == [row["head_bytes"] for row in plan.tables["ranks"]], "predicted and measured"


def test_ask_streams_and_returns(bringup: Bringup, capsys: pytest.CaptureFixture[str]) -> None:
    answer = bringup.ask(QUESTION, CAT, max_new_tokens=12)
    assert capsys.readouterr().out == answer.text + "\n"
    assert "cat" in answer.text.lower()
    assert answer.was_shown
    assert "tokens in" in repr(answer)
    quiet = bringup.ask(QUESTION, CAT.read_bytes(), stream=False, max_new_tokens=12)
    assert capsys.readouterr().out == ""
    assert repr(quiet) == quiet.text == answer.text
    assert "moo" in bringup.ask("What does a cow say?", stream=False).text.lower()


def test_infer_judges_the_answers(bringup: Bringup) -> None:
    report = bringup.infer()
    assert report.passed, failed(report)
    names = [check.name for check in report.checks]
    assert names == [
        "answers are neither empty, loops nor gibberish",
        "answers are the expected ones",
        "the same seed gives the same tokens",
        "the picture fills its placeholders",
        "another picture gives another answer",
    ]
    filled = next(check for check in report.checks if check.name == "the picture fills its placeholders")
    assert filled.value == 64
    bringup.run.events.flush()
    requests = [event for _, event in bringup.run.read_events().requests()]
    assert len(requests) >= len(report.tables["answers"])
    assert all(event.completion_tokens for event in requests)


@pytest.mark.parametrize(("hottest", "passes"), [(0.0, True), (1.0, False)])
def test_a_loop_of_the_likeliest_tokens_alone_is_a_warning(bringup: Bringup, hottest: float, passes: bool) -> None:
    """Small models run in circles where a rounding leads them there; what does so however it is drawn is broken."""
    engine = bringup.engine

    def complete(prompt: str, pictures: list[Any], params: SamplingParams, chat: bool) -> Completion:
        answer = engine.complete(prompt, pictures, params, chat)
        circles = {"text": "a cow, " * 10, "tokens": (3, 4, 5) * 10}
        return msgspec.structs.replace(answer, **circles) if params.temperature <= hottest else answer

    blind = msgspec.structs.replace(engine.info(), sees=False)
    report = infer(SimpleNamespace(info=lambda: blind, complete=complete), [Question(prompt="What does a cow say?")])  # type: ignore[arg-type]
    assert report.passed == passes
    assert [finding.code for finding in report.findings] == (["odd-answers"] if passes else [])
    assert passes or "a loop: the last 3 tokens 10 times" in failed(report)[0]


def test_infer_with_pictures_of_its_own(bringup: Bringup) -> None:
    questions = [Question(prompt=QUESTION, picture=drawn(which), name=which) for which in DRAWN]
    report = bringup.infer([Question(prompt="What does a cow say?"), *questions])
    assert "answers are the expected ones" not in [check.name for check in report.checks]
    assert [row["picture"] for row in report.tables["answers"]] == [None, *DRAWN]


def test_profile_splits_a_token_on_every_rank(bringup: Bringup) -> None:
    report = bringup.profile(prompt_tokens=32, decode_steps=4)
    assert report.passed
    decode = [row for row in report.tables["steps"] if row["phase"] == "decode"]
    assert [row["rank"] for row in decode] == [0, 1]
    for row in decode:
        parts = row["compute_ms"] + row["communication_ms"] + row["waiting_ms"]
        assert parts == pytest.approx(row["timed_ms"], rel=0.2)
        assert row["communication_bytes"] > 0
    assert any(row["collective"].startswith("all_reduce tp") for row in report.tables["collectives"])
    assert 0 < float(report.value("decode_of_limit")) < 150  # type: ignore[arg-type]
    assert {row["rank"] for row in report.tables["layers"]} == {0, 1}


def test_the_same_run_can_be_attached_to(bringup: Bringup) -> None:
    with Bringup.attach(bringup.run.directory) as again:
        assert again.options == bringup.options
        assert again.run.record.rungs == bringup.run.record.rungs
        again.detached = True  # the engine is the other session's
        assert again.ask("What does a cow say?", stream=False).text


def test_progress_reaches_listeners_and_the_run(bringup: Bringup) -> None:
    seen: list[ProgressEvent] = []
    bringup._listeners = (*bringup._listeners, seen.append)
    bringup.load()
    assert {event.rung for event in seen} == {"load"}
    bringup.run.events.flush()
    kept = [event for _, event in bringup.run.read_events().progress()]
    assert seen[-1] in kept


def test_a_rung_that_is_refused_leaves_a_report(bringup: Bringup) -> None:
    report = bringup.verify(golden=CAT)
    assert report.status == "refused"
    bringup.force = False
    assert "cat.png" in str(report.findings[0].file)
    refused = bringup.profile()
    assert refused.findings[0].code == "earlier-rung-failed"
    bringup.force = True
    assert bringup.profile(prompt_tokens=8, decode_steps=2, bandwidth=False).forced


def test_before_start_there_is_no_engine(tmp_path: Path) -> None:
    with Bringup(MENAGERIE, root=tmp_path) as session:
        with pytest.raises(Refused, match="no engine runs"):
            session.ask("hello")
        assert "nothing yet" in repr(session)
    with Bringup(MENAGERIE, root=tmp_path, tp=2, attention="whole") as session:
        assert session.options.mesh == Mesh(tp=2, attention="whole")
        assert "tp 2, attention whole" in repr(session)
    with pytest.raises(Refused, match="unknown option 'max_contxt'; did you mean max_context"):
        Bringup(MENAGERIE, root=tmp_path, max_contxt=3)


def test_a_detached_engine_outlives_its_session_until_a_verb_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bringup(MENAGERIE, run=tmp_path / "run", detached=True, max_context=128, dtype="F32", threads=1) as session:
        assert session.start().passed
        assert session.host is not None
        pids = session.host.pids
    assert alive(pids) == list(pids)
    with Bringup.attach(tmp_path / "run") as again:
        assert again.host is not None
        assert again.detached
        assert again.engine.info().dtype == "F32"
    assert alive(pids) == list(pids)
    rungs = Run.attach(tmp_path / "run").record.rungs
    with Bringup(MENAGERIE, run=tmp_path / "run") as other:
        assert "runs in" in other.start().findings[0].message, "a second one beside it is refused"
        assert Run.attach(tmp_path / "run").record.rungs == rungs, "what its start reported holds"
        assert not other.run.require("export")
    record = Run.attach(tmp_path / "run").record
    assert record.engine is not None
    assert record.engine["options"]["max_context"] == 128, "what the engine that runs was started with"
    before = signal.getsignal(signal.SIGTERM)
    assert main(["serve", str(MENAGERIE), "--port", "0", "--run", str(tmp_path / "run")]) == 2
    signal.signal(signal.SIGTERM, before)  # `serve` ends by it as by an interrupt
    assert Run.attach(tmp_path / "run").record.rungs == rungs
    assert alive(pids) == list(pids)
    capsys.readouterr()
    assert main(["serve", "--stop", str(tmp_path / "run"), "--json", "-"]) == 0
    gone(pids)
    report = json.loads(capsys.readouterr().out)
    assert (report["verb"], report["status"]) == ("serve", "passed")
    assert report["checks"][0]["value"] == report["checks"][0]["limit"] == len(pids) + 1
    assert main(["serve", "--stop", str(tmp_path / "run")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the host has ended" in said
    assert "this one has none to end" in said


def test_broken_weights_are_found_by_infer_and_stop_the_ladder(tmp_path: Path) -> None:
    """Shuffled weights load without a complaint: only the answers can tell."""
    home = Path(shutil.copytree(MENAGERIE, tmp_path / "shuffled"))
    draw = np.random.default_rng(0)
    for name, tensor in Checkpoint.open(home).tensors.items():
        if name.endswith("proj.weight") or "lm_head" in name:
            values = np.memmap(home / tensor.file, "u2", "r+", tensor.offset_bytes, tensor.nbytes // 2)
            values[:] = draw.permutation(values)
            values.flush()
    with Bringup(home, root=tmp_path / "runs", max_context=128, threads=1) as session:
        assert session.scan().passed
        assert session.start().passed
        report = session.infer(
            [Question(prompt=QUESTION, picture=CAT, name="cat"), Question(prompt="What does a cow say?")]
        )
        assert report.status == "failed"
        assert "answers are neither empty" in failed(report)[0]
        assert session.export().findings[0].code == "earlier-rung-failed"


@pytest.mark.slow
def test_up_climbs_the_whole_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "up.json"
    status = main(["up", str(MENAGERIE), "--tp", "2", "--run", str(run), "--json", str(out), "--max-context", "256"])
    said, err = capsys.readouterr()
    assert status == 0, said + err
    rungs = ["scan", "plan", "load", "start", "infer", "validate", "verify", "profile", "stress", "export"]
    assert [line.split()[1] for line in said.splitlines() if line.startswith("passed   ")] == rungs
    assert [rung.verb for rung in Run.attach(run).record.rungs] == [*rungs, "up"]
    report = Report.read(out)
    assert [check.name for check in report.checks] == rungs
    answers = Report.read(run / "reports" / "05-infer.json").tables["answers"]
    assert {row["picture"]: row["answer"] for row in answers}["cat.png"] == "A cat."
    for row in report.tables["predicted_and_measured"]:
        if row["unit"] == "B":
            assert row["measured"] == pytest.approx(row["predicted"], rel=0.01)
    card = yaml.safe_load((run / "card.yaml").read_text())
    assert {entry["rung"] for entry in card["verified"]} == set(rungs[:-1])
    assert [entry.get("claim") for entry in card["not_verified"]] == ["answers are those of the accepted run"]
    assert card["commit"] is not None
    adaptation = yaml.safe_load((run / "adaptation.yaml").read_text())
    assert adaptation["family"] == "llava"
    assert any("vision_tower" in rule["tensor"] for rule in adaptation["rules"])
    assert adaptation["engine"]["mesh"]["tp"] == 2
    assert adaptation["operators"]
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        names = archive.getnames()
    assert {
        "run/card.yaml",
        "run/adaptation.yaml",
        "run/report.html",
        "run/events.sqlite",
        "run/reports/07-verify.json",
    } <= set(names)
    assert not [name for name in names if "host.json" in name], "the handle holds a token"
    exported = tmp_path / "again.zip"
    assert main(["export", str(run), "--out", str(exported), "-q"]) == 0
    assert "run/card.yaml" in zipfile.ZipFile(exported).namelist()
    assert not list(run.glob("fault-*"))
    assert json.loads((run / "run.json").read_text())["rungs"][-1]["verb"] == "export"


def test_a_lost_rank_fails_the_rung_and_a_new_start_mends_it(tmp_path: Path) -> None:
    with Bringup(MENAGERIE, tp=2, root=tmp_path, max_context=256) as session:
        assert session.start().passed
        assert session.host is not None
        os.kill(session.host.pids[1], signal.SIGKILL)
        report = session.infer()
        assert report.status == "failed"
        assert report.findings[-1].code in ("rank-lost", "engine-failed")
        assert "rank 1" in " ".join(f.message for f in report.findings)
        assert session.start().passed
        assert "moo" in session.ask("What does a cow say?", stream=False).text.lower()


def test_an_interrupt_of_an_answer_ends_the_request_and_says_so() -> None:
    closed = []

    class Engine:
        def generate(self, *_: object) -> Iterator[Delta]:
            try:
                yield Delta(text="Moo")
                raise KeyboardInterrupt
            finally:
                closed.append(True)

    session = SimpleNamespace(engine=Engine(), checkpoint=str(MENAGERIE))
    with pytest.raises(KeyboardInterrupt, match="the engine goes on") as caught:
        Bringup.ask(session, "What does a cow say?")  # type: ignore[arg-type]
    assert closed
    assert caught.value.__suppress_context__, "what the connection was in the middle of is nobody's concern"


def test_more_ranks_than_a_machine_runs_are_refused_before_they_are_laid_out(tmp_path: Path) -> None:
    with Bringup(MENAGERIE, run=tmp_path / "run", dp=1_000_000, telemetry_hz=0) as session:
        report = session.plan()
    assert (report.status, report.findings[0].code) == ("refused", "usage")
    assert "1,000,000 ranks are too many for one machine" in report.findings[0].message
