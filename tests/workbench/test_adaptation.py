"""The next bring-up starts from the last one: what it uses, what it shows as changed, what it flags as worse."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.adaptation import Adaptation, compare, config_changes
from firstlight.workbench.arguments import stated
from firstlight.workbench.compare_runs import compare_runs, worse_by
from firstlight.workbench.export import adaptation, latest
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run

MENAGERIE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"


def run_with(root: Path, decode_ms: float, weight_bytes: int = 10) -> Run:
    run = Run.create("menagerie", str(MENAGERIE), root)
    for verb, metrics in (
        ("load", {"largest_rank_bytes": (weight_bytes, "B")}),
        ("profile", {"decode_ms": (decode_ms, "ms"), "decode_tokens_per_s": (1000 / decode_ms, "tokens/s")}),
    ):
        draft = Draft(verb, "menagerie")
        draft.check("a check", True)
        for name, (value, unit) in metrics.items():
            draft.metric(name, value, unit)
        run.add(draft.close())
    return run


def saved(run: Run, path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**adaptation(run, latest(run.reports())), **changes}))
    return path


def test_what_got_worse_is_flagged_and_bytes_are_only_shown(tmp_path: Path) -> None:
    before, after = run_with(tmp_path / "a", 10.0), run_with(tmp_path / "b", 20.0, weight_bytes=30)
    report = compare(Adaptation.read(saved(before, tmp_path / "adaptation.yaml")), after)
    assert report.value("regressions") == 2
    assert [finding.code for finding in report.findings] == ["regression", "regression"]
    assert "decode_ms is 2.00 times worse" in report.findings[0].message
    verdicts = {row["figure"]: row["verdict"] for row in report.tables["figures"]}
    assert verdicts == {"largest_rank_bytes": "", "decode_ms": "worse", "decode_tokens_per_s": "worse"}
    assert report.value("config_changes") == 0
    back = compare(Adaptation.read(saved(after, tmp_path / "back.yaml")), before)
    assert {row["figure"]: row["verdict"] for row in back.tables["figures"]}["decode_ms"] == "better"
    assert not back.findings


def test_changed_keys_are_shown_by_their_path(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10.0)
    config = adaptation(run, latest(run.reports()))["config"]
    config["text_config"]["hidden_act"] = "gelu"
    config["new_key"] = [1, 2]
    report = compare(Adaptation.read(saved(run, tmp_path / "a.yaml", config=config)), run)
    assert {row["key"]: (row["before"], row["now"]) for row in report.tables["config"]} == {
        "text_config.hidden_act": ("'gelu'", "'silu'"),
        "new_key": ("[1, 2]", "absent"),
    }
    assert list(config_changes({"a": 1, "_name_or_path": "x"}, {"a": 1, "_name_or_path": "y"})) == []


OTHERS = {"hosts": ["elsewhere"], "trust_remote_code": True}


def test_options_of_the_file_are_used_where_none_were_given(tmp_path: Path) -> None:
    wanted = EngineOptions(checkpoint="c", max_batch=4)
    kept = Adaptation(
        engine={"mesh": {"tp": 2}, "max_batch": 16, "max_context": 512, "threads": 64, "gone": 1, **OTHERS}
    )
    used = kept.options(wanted, frozenset())
    assert (used.mesh, used.max_batch, used.max_context, used.threads) == (Mesh(tp=2), 4, 512, None)
    assert (used.hosts, used.trust_remote_code) == ((), False), "whose code runs, and where, is asked"
    assert kept.unknown == ["gone"]
    assert kept.options(wanted, frozenset(("mesh",))).mesh == Mesh()
    whole = Adaptation(engine={"mesh": {"tp": 2, "attention": "whole"}})
    assert whole.options(wanted, frozenset()).mesh == Mesh(tp=2, attention="whole")


def test_what_the_command_line_says_comes_first_be_it_the_default(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("mesh: {pp: 1}\ndtype: auto\ntemperature: 1\n")
    assert stated("up", ["X", "--max-batch=8", "-q"]) == {"checkpoint", "max_batch", "quiet"}
    assert stated("up", ["X", "--config", str(tmp_path / "c.yaml")]) == {"checkpoint", "config", "pp", "dtype"}


def test_a_dtype_that_changed_is_shown_under_either_of_its_names() -> None:
    assert list(config_changes({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"})) == []
    (row,) = config_changes({"torch_dtype": "bfloat16"}, {"dtype": "float16"})
    assert row == {"key": "dtype", "before": "'bfloat16'", "now": "'float16'"}


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "engine: 3",
        "a: [",
        "\x00",
        "{}",
        "{model: a, engine: {max_batch: many}}",
        "{model: a, format: 2}",
        "{model: a, figures: {load: {read_rate: 7}}}",
        "{model: a, validation: [{answer: x}]}",
        "{model: a, validation: [{name: x, tokens: abc}]}",
        "{model: a, environment: {versions: [x]}}",
        "model: !!python/object/apply:os.getcwd []",
        "model: a\nconfig: &c {q: *c}",
        "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
        + "model: a",
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(Refused, match="cannot be used"):
        Adaptation.read(tmp_path / "a.yaml")
    with pytest.raises(Refused, match="cannot be used"):
        Adaptation.read(tmp_path / "absent.yaml")


def test_an_option_that_this_version_lacks_is_said(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10.0)
    report = compare(Adaptation.read(saved(run, tmp_path / "a.yaml", engine={"quantum": True})), run)
    assert [(finding.code, finding.found) for finding in report.findings] == [("usage", "quantum")]


def test_runs_are_compared_figure_by_figure(tmp_path: Path) -> None:
    rows = compare_runs([run_with(tmp_path / "a", 10.0), run_with(tmp_path / "b", 5.0)])
    found = {row.figure: row for row in rows}
    assert found["decode_ms"].values == (10.0, 5.0)
    assert found["decode_ms"].ratio == pytest.approx(0.5)
    assert worse_by("decode_tokens_per_s", 100.0, 50.0) == pytest.approx(2.0)
    assert worse_by("largest_rank_bytes", 1, 2) is None
    assert worse_by("decode_limit_ms", 1.0, 2.0) is None, "what a machine allows is nothing that a run reached"
