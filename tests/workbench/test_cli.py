"""The command line: exit statuses, refusals in a sentence, configuration files, and how soon it answers."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from firstlight.workbench import cli
from firstlight.workbench.arguments import parser_of
from firstlight.workbench.cli import VERBS, load_command, main
from firstlight.workbench.outlet import Outlet
from firstlight.workbench.report import Report
from tests.costs import within

Get = Callable[[str], Path]
ROOT = Path(__file__).parents[2]
FACTS = str(ROOT / "data" / "models" / "llama-3.1-405b.json")
USUAL = "import asyncio, decimal, email.message, http.client, json, xml.dom.minidom"  # what any small program loads


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a call in this process."""
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_help_lists_every_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in ((), ("--help",), ("help",)):
        status, out, _ = say(capsys, *words)
        assert status == 0
        assert all(re.search(rf"^  {verb} ", out, re.MULTILINE) for verb in VERBS)
        assert max(map(len, out.splitlines())) <= 60
    assert say(capsys, "--version")[1].startswith("firstlight ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_common_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"--json", "--run", "-q", "--config", "--force"} <= set(parser_of(verb, load_command(verb)).flags)
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    assert f"usage: firstlight {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scna",), "did you mean scan?"),
        (("--verison",), "unknown option '--verison'; did you mean --version?"),
        (("scan",), "the following arguments are required: CKPT"),
        (("scan", "x", "--depe"), "did you mean --deep"),
        (("scan", "x", "y"), "'y' is one argument too many"),
        (("scan", "x", "--json"), "expected one argument"),
        (("plan", FACTS, "--tp", "0"), "'0' is not a whole number of at least 1"),
        (("plan", FACTS, "--tp", "two"), "'two' is not a whole number"),
        (("plan", FACTS, "--cluster", "8H200"), "is not understood"),
        (("plan", FACTS, "--cluster", "8xH200x"), "names no device"),
        (("plan", FACTS, "--cluster", ""), "--cluster '' is not understood"),
        (("serve", "x", "--port", "65536"), "'65536' is not a port from 0 to 65535"),
        (("serve",), "starts the engine of a checkpoint, or ends that of a run"),
        (("serve", "x", "--stop", "y"), "found x and --stop y"),
        (("serve", "--stop", "no/such/run"), "no engine host was started here"),
        (("dashboard", ".", "--port", "-1"), "'-1' is not a port"),
        (("load", "x", "--hosts", "a,b"), "load reads on this machine alone"),
        (("generate", "x", "--prompt", "a", "--dtype", "int3"), "'int3' is not one of auto, bf16, f16, f32"),
        (("generate", "x"), "there is no prompt"),
        (("generate", "x", "--prompt", "a", "--image", "no.png"), "the picture no.png is not there"),
        (("generate", "x", "--prompt", "a", "--image", "/dev/null"), "found a device, a pipe or a socket"),
        (("generate", "x", "--prompt", "a", "--temperature", "-1"), "temperature is out of range"),
        (("generate", "x", "--prompt", "a", "--backend", "nccl", "--device", "cpu"), "does not go with"),
        (("generate", "x", "--prompt", "a", "--device", "cpu", "--device-ids", "0,1"), "device ids name GPUs"),
        (("generate", "x", "--prompt", "a", "--device-ids", "a"), "'a' is not a list of device numbers"),
        (("generate", "x", "--prompt", "a", "--threads", "100000"), "threads is not possible"),
        (("verify", "x", "--layers", "5"), "'5' is not A:B"),
        (("verify", str(ROOT / "data" / "samples" / "menagerie"), "--golden", "."), ". is no golden file"),
        (("verify", "x", "--limit", "nan"), "'nan' is not a number between 0 and 1"),
        (("verify", "x", "--limit", "2"), "'2' is not a number between 0 and 1"),
        (("scan", "x", "--json", "no/such/dir/r.json"), "'no/such/dir/r.json' cannot be written"),
        (("scan", "x", "--json", "."), "'.' cannot be written"),
        (("serve", "x", "--host", "0.0.0.0"), "without a token"),
        (("scan", "no/such/dir"), "not a checkpoint directory"),
        (("scan", "ftp://host/model"), "ftp:// is not read"),
        (("scan", "https://me:secret@host/model"), "credentials"),
        (("export", "no/such/run"), "no/such/run is not a run directory"),
        (("export", str(ROOT / "Makefile")), "makes it found a file"),
        (("stress", "no/such/dir"), "not a checkpoint directory"),
        (("stress", "n" * 300), "found file name too long"),
        (("scan", ""), "CKPT is empty"),
        (("serve", "--stop", ""), "--stop is empty"),
        (("dashboard", ".", "--token", ""), "--token is empty: a token was expected"),
        (("generate", "x", "--prompt", "a", "--image", ""), "--image is empty"),
        (("runbook", "n", "x"), "n is no notebook"),
        (("runbook", str(ROOT / "notebooks" / "runbook_template.ipynb"), "no/such/dir"), "not a checkpoint directory"),
        (("preprocess", "no/such/dir", "--prompt", "a", "--out", "o"), "no/such/dir is not a checkpoint directory"),
        (("dashboard", "no/such/dir"), "no/such/dir is not a folder of runs"),
        (("dashboard", ".", "--host", "0.0.0.0"), "without a token"),
        (("preprocess", "x", "--prompt", "a"), "--out is missing"),
        (("preprocess", ".", "--prompt", "a", "--out", "no/such/dir/o"), "--out 'no/such/dir/o' cannot be written"),
        (("scan", "x", "--config", "no.yaml"), "no.yaml cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = say(capsys, *words)
    assert status == 2
    assert out == ""
    assert said in " ".join(err.split())
    assert err.startswith("refused: ")
    assert re.search(r"^  code +[a-z-]+$", err, re.MULTILINE)
    assert "Traceback" not in err


def test_what_a_rung_far_up_would_refuse_is_refused_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "golden.safetensors").write_bytes(b"no golden file")
    for wrong in (["--golden", "absent"], ["--golden", "golden.safetensors"], ["--detached", "--hosts", "a,b"]):
        assert say(capsys, "up", str(ROOT / "data" / "samples" / "menagerie"), *wrong)[0] == 2
    assert not (tmp_path / "runs").exists()


def test_nothing_is_made_for_a_checkpoint_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = say(capsys, "up", "mistyped")
    assert (status, [*tmp_path.iterdir()]) == (2, [])
    assert "mistyped is not a checkpoint directory" in err


def test_a_refusal_is_a_report_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = say(capsys, "scan", str(tmp_path), "--json", str(tmp_path / "r.json"))
    report = Report.read(tmp_path / "r.json")
    assert (status, report.status, report.verb) == (2, "refused", "scan")
    assert report.findings[0].file == "config.json"


def test_json_on_standard_output_is_alone_there(checkpoint: Get, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = say(capsys, "scan", str(checkpoint("llama")), "--json", "-")
    assert (status, json.loads(out)["status"]) == (0, "passed")
    assert "passed  scan" in err
    _, out, err = say(capsys, "scan", str(checkpoint("llama")), "--json", "-", "-q")
    assert json.loads(out)["verb"] == "scan"
    assert err == ""


def test_a_terminal_without_the_characters_ends_nothing(checkpoint: Get, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "modèle µ")
    command = [sys.executable, "-m", "firstlight.workbench", "scan", str(folder)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, capture_output=True, env=environment)
    assert said.returncode == 0, said.stderr
    assert b"mod?le ?" in said.stdout
    told = subprocess.run([*command, "--json", "-"], capture_output=True, env=environment)
    assert "modèle µ" in json.loads(told.stdout.decode())["title"], "JSON is UTF-8"


@pytest.mark.parametrize(
    "words", [("scan",), ("scna", "x"), ("plan", FACTS, "--tp", "0"), ("generate", "x", "--nope"), ("scan", "x", "y")]
)
def test_a_call_that_is_not_understood_is_a_report_too(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = say(capsys, *words, "--json", "-")
    assert (status, json.loads(out)["status"], json.loads(out)["verb"]) == (2, "refused", words[0])
    assert json.loads(out)["findings"][0]["code"] == "usage"
    assert err.startswith("refused: ")
    assert say(capsys, *words, f"--json={tmp_path / 'r.json'}")[1] == ""
    assert Report.read(tmp_path / "r.json").status == "refused"


def test_a_name_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = say(capsys, "scan", os.fsdecode(b"/tmp/\xff"), "--json", "-")
    assert (status, json.loads(out)["findings"][0]["message"]) == (2, r"/tmp/\udcff is not UTF-8")
    assert r"/tmp/\udcff is not UTF-8" in err


def test_reports_are_appended_to_a_run(checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, run = str(checkpoint("llama")), str(tmp_path / "run")
    assert say(capsys, "scan", home, "--run", run, "-q")[0] == 0
    assert say(capsys, "plan", home, "--run", run, "-q")[0] == 0
    assert sorted(file.name for file in (tmp_path / "run" / "reports").iterdir()) == ["01-scan.json", "02-plan.json"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == "llama"


def test_load_says_which_options_made_no_difference(checkpoint: Get, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--residency", "streamed", "--operator", "linear=native", "--json", "-", "-q")
    status, out, _ = say(capsys, "load", str(checkpoint("llama")), *words)
    said = [finding for finding in json.loads(out)["findings"] if finding["code"] == "usage"]
    assert (status, [finding["severity"] for finding in said]) == (0, ["note"])
    assert said[0]["message"].startswith("--residency, --operator made no difference")


def test_a_rung_above_a_failed_one_needs_force(
    checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, run = str(checkpoint("llama")), str(tmp_path / "run")
    words = ("plan", home, "--run", run, "--cluster", str(_small_cluster(tmp_path)))
    assert say(capsys, *words)[0] == 1
    status, _, err = say(capsys, "load", home, "--run", run)
    assert status == 2
    assert "load stands on plan (failed)" in err
    assert say(capsys, "load", home, "--run", run, "--force", "-q")[0] == 0
    last = sorted((tmp_path / "run" / "reports").iterdir())[-1]
    assert (last.name, Report.read(last).forced) == ("03-load.json", True)


def _small_cluster(folder: Path) -> Path:
    file = folder / "cluster.yaml"
    file.write_text("nodes: 1\nper_node: 1\ndevice: {name: tiny, memory_bytes: 1000}\n")
    return file


def test_a_configuration_file_sets_what_flags_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mesh: {tp: 4, pp: 2}\ncluster: 8xH200\ncontext: 1000\ndtype: bf16\nlimits: {max-batch: 3}\n")
    with pytest.raises(AssertionError):
        assert say(capsys, "plan", FACTS, "--config", str(file))[0] == 0  # max-batch is spelt max_batch in a section
    file.write_text("mesh: {tp: 4, pp: 2}\ncluster: 8xH200\ncontext: 1000\ndtype: bf16\nlimits: {max_batch: 3}\n")
    status, out, _ = say(capsys, "plan", FACTS, "--config", str(file), "--tp", "2", "--json", "-", "-q")
    plain = json.loads(out)
    assert plain["title"] == "llama-3.1-405b on 8xH200-SXM, pp 2 x tp 2"
    assert "1,000 tokens of context" in plain["checks"][0]["detail"]
    assert status == 1
    file.write_text(
        "mesh: {tp: 13, attention: whole}\ncluster: 13xH200\n"
    )  # 128 heads, 53,248 channels; 134 GiB of attention
    status, out, _ = say(capsys, "plan", FACTS, "--config", str(file), "--json", "-", "-q")
    assert (status, json.loads(out)["title"]) == (1, "llama-3.1-405b on 13xH200-SXM, tp 13, attention whole")
    status, _, err = say(capsys, "plan", FACTS, "--config", str(file), "--attention", "divided")
    assert status == 2
    assert "--attention whole" in " ".join(err.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mesh: {tq: 2}", "unknown key mesh: 'tq' in {file}; did you mean tp"),
        ("temperatur: 1", "unknown key 'temperatur' in {file}; did you mean temperature"),
        ("mesh: 3", "mesh has a value that cannot be used"),
        ("mesh: {tp: many}", "tp has a value that cannot be used"),
        ("mesh: {tp: true}", "tp has a value that cannot be used"),
        ("mesh: {attention: hole}", "attention has a value that cannot be used"),
        ("objective: speed", "objective has a value that cannot be used"),
        ("force: perhaps", "force has a value that cannot be used"),
        ("[1, 2]", "holds no settings"),
        ("a: b: c", "is not YAML"),
        ("dtype: bf16\ndtype: f32", "'dtype' stands twice"),
        ("mesh: {tp: 1, tp: 2}", "'tp' stands twice"),
        ("json: x", "unknown key 'json'"),
        ("max_batch: 3\nlimits: {max_batch: 4}", "max_batch has a value that cannot be used"),
        ("page_size: many", "page_size has a value that cannot be used"),  # plan has none: other verbs do
        ("cache: {page_size: {a: 1}}", "page_size has a value that cannot be used"),
    ],
)
def test_configuration_files_are_checked_as_flags_are(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    status, _, err = say(capsys, "plan", FACTS, "--cluster", "8xH200", "--config", str(file))
    assert status == 2
    assert "".join(said.format(file=file).split()) in "".join(err.split())


def test_a_section_without_keys_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mesh:\ncache: {}\ndtype:\n")
    assert say(capsys, "plan", FACTS, "--cluster", "64xH200", "--config", str(file), "-q")[0] == 0


def test_who_names_gpus_is_not_given_a_cpu(
    checkpoint: Get, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # put back afterwards
    for verb in ("load", "profile"):
        status, _, err = say(capsys, verb, str(checkpoint("llama")), "--device-ids", "7")
        assert status == 2
        assert "no CUDA device" in " ".join(err.split())


def test_one_file_serves_verbs_that_lack_some_of_its_keys(
    checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("temperature: 0.5\nmesh: {tp: 2}\ndevice_ids: [0, 1]\nstop: [a, b]\n")
    assert say(capsys, "scan", str(checkpoint("llama")), "--config", str(file), "-q")[0] == 0


def _command(act: Callable[[], None]) -> object:
    def run(arguments: object, session: object) -> None:
        act()

    return SimpleNamespace(arguments=lambda parser: None, run=run)


def test_interrupts_and_faults_have_their_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_command", lambda verb: _command(interrupted))
    assert say(capsys, "scan") == (130, "", "interrupted\n")
    monkeypatch.setattr(cli, "load_command", lambda verb: _command(lambda: {}["no such key"]))  # type: ignore[index]
    status, _, err = say(capsys, "scan", "-q")
    assert status == 1
    assert "a fault of Firstlight itself: KeyError" in " ".join(err.split())
    assert "Traceback" not in err
    Path(re.search(r"(\S*fault-\S+\.txt)", err)[1]).unlink()  # type: ignore[index]


@pytest.mark.parametrize("root", [True, False])
def test_the_notebooks_open_for_whoever_asks(
    root: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jupyter refuses root unless told; in a container there is nobody else, and often no browser."""
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: called.append(words))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    lab = load_command("lab")
    session: Any = SimpleNamespace(outlet=Outlet(("lab", "--json", "-")), close=lambda: None)
    lab.run(parser_of("lab", lab).parse_args(["--no-browser"]), session)
    words = called[0][1:]
    assert words[:2] == ["-m", "jupyterlab"]
    assert words[3:] == ["--no-browser", *(["--allow-root"] if root else [])]
    assert json.loads(capsys.readouterr().out)["verb"] == "lab"


def test_help_and_scan_answer_at_once(checkpoint: Get) -> None:
    """Measured in what a start of Python takes on this machine, at this hour: 0.06 s where nothing else runs.

    Modules are compiled once, as anywhere but where somebody told Python to write nothing down.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def python(*words: str) -> None:
        run = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr

    ours, model = ["-m", "firstlight.workbench"], str(checkpoint("llava-clip"))
    within(1, lambda: python(*ours, "--help"), lambda: python("-c", USUAL))
    within(5, lambda: python(*ours, "scan", model), lambda: python("-c", USUAL))


@pytest.mark.parametrize(
    "words", [["--help"], ["scan", "CKPT"], ["plan", FACTS, "--cluster", "8xH200"], ["serve", "--help"]]
)
def test_no_torch_is_loaded_for_what_needs_none(words: list[str], checkpoint: Get) -> None:
    words = [str(checkpoint("llama")) if word == "CKPT" else word for word in words]
    code = f"import sys\nfrom firstlight.workbench.cli import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
    code += "print(*{'torch', 'triton', 'transformers', 'pandas', 'fastapi'} & set(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.strip() == ""


def test_a_reader_that_leaves_is_no_error(checkpoint: Get) -> None:
    command = f"{sys.executable} -m firstlight.workbench scan {checkpoint('llama')} | head -1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout.startswith("scan  llama")


@pytest.mark.parametrize("verb", ["load", "generate", "serve", "verify", "profile"])
def test_nothing_starts_on_a_broken_checkpoint(
    verb: str, checkpoint: Get, golden_file: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scan fails on it, with its reasons; whatever would compute with it is refused."""
    home = Path(shutil.copytree(checkpoint("llama"), tmp_path / "broken"))
    lost = sorted(home.glob("*.safetensors"))[-1]
    lost.unlink()
    more = {
        "generate": ("--prompt", "a"),
        "serve": ("--port", "0"),
        "verify": ("--golden", str(golden_file("llama"))),
    }
    status, out, err = say(capsys, verb, str(home), *more.get(verb, ()))
    assert (status, out) == (2, "")
    assert "missing-shard" in err
    assert lost.name in err
    assert say(capsys, "scan", str(home), "-q")[0] == 1


def test_verify_from_the_command_line(checkpoint: Get, golden_file: Get, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "verify",
        str(checkpoint("llama")),
        "--golden",
        str(golden_file("llama")),
        "--layers",
        "0:2",
        "--json",
        "-",
    )
    status, out, _ = say(capsys, *words, "-q")
    report = json.loads(out)
    assert (status, report["status"]) == (0, "passed")
    other = ("verify", str(checkpoint("llama-biases")), "--golden", str(golden_file("llama")), "-q")
    assert say(capsys, *other)[0] in (1, 2), "another model's numbers do not pass"


def test_a_model_without_a_tokenizer_answers_no_text(checkpoint: Get, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = say(capsys, "generate", str(checkpoint("llama")), "--prompt", "a")
    assert status == 2
    assert "tokenizer.json" in err
    assert "missing-side-file" in err


def test_verify_asks_for_answers_where_a_checkpoint_can_give_them(
    checkpoint: Get, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a golden file; one without a tokenizer is verified all the same, and says what was left out."""
    status, out, err = say(capsys, "verify", str(checkpoint("llama")), "--json", "-", "-q")
    assert status == 0, err
    last = json.loads(out)["checks"][-1]
    assert (last["name"], last["status"]) == ("answers", "skipped")
    assert "tokenizer.json" in last["detail"]


def test_a_configuration_nested_too_deeply_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    status, _, err = say(capsys, "scan", "x", "--config", str(tmp_path / "deep.yaml"))
    assert status == 2
    assert "is not YAML" in " ".join(err.split())
