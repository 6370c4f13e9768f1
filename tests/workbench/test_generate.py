"""One answer from the command line: the text alone on standard output, everything else in the report."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from firstlight.workbench.cli import main
from tests.waiting import PATIENCE_S, gone

SAMPLES = Path(__file__).parents[2] / "data" / "samples"
MENAGERIE = str(SAMPLES / "menagerie")
PICTURES = SAMPLES / "pictures"
ASK = ("--prompt", "What animal is this?", "--max-new-tokens", "16", "--max-context", "256", "--threads", "1")


def test_the_answer_is_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    status = main(["generate", MENAGERIE, *ASK, "--image", str(PICTURES / "cat.png"), "--json", str(file)])
    out, err = capsys.readouterr()
    report = json.loads(file.read_text())
    (answer,) = report["tables"]["answer"]
    assert (status, report["status"]) == (0, "passed")
    assert out == answer["text"] + "\n"
    assert "cat" in out.lower()
    assert answer["finish"] == "stop"
    assert len(answer["token_ids"]) == report["metrics"]["completion_tokens"]["value"]
    (prompt,), (picture,) = report["tables"]["prompt"], report["tables"]["pictures"]
    assert len(prompt["token_ids"]) == report["metrics"]["prompt_tokens"]["value"] == picture["tokens"] + 12
    assert picture["source"].endswith("cat.png")
    assert {"name": "image_mean", "value": [0.5, 0.5, 0.5]}.items() <= next(
        row for row in report["tables"]["constants"] if row["name"] == "image_mean"
    ).items()
    for metric, unit in (("first_token_s", "s"), ("total_s", "s"), ("tokens_per_s", "tokens/s")):
        assert report["metrics"][metric]["unit"] == unit
        assert report["metrics"][metric]["value"] > 0
    assert err.startswith(f"{report['metrics']['prompt_tokens']['value']} tokens in")


def test_the_same_seed_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", MENAGERIE, *ASK, "--image", str(PICTURES / "owl.png"), "--temperature", "1.5", "--seed", "7"]
    texts = []
    for _ in range(2):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_two_ranks_say_what_one_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", MENAGERIE, *ASK, "--image", str(PICTURES / "dog.png"), "--dtype", "f32"]
    assert main(words) == 0
    one = capsys.readouterr().out
    assert main([*words, "--tp", "2"]) == 0
    assert capsys.readouterr().out == one


def test_an_orientation_tag_is_obeyed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, image = tmp_path / "r.json", PICTURES / "elephant_sideways.jpg"
    assert main(["generate", MENAGERIE, *ASK, "--image", str(image), "--json", str(file), "-q"]) == 0
    assert capsys.readouterr().out == ""
    (picture,) = json.loads(file.read_text())["tables"]["pictures"]
    assert picture["orientation_applied"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--image", __file__), "bad-image"),
        (("--raw", "--image", str(PICTURES / "cat.png")), "placeholder"),
        (("--tp", "3"), "tp 3 is not possible"),
        (("--max-context", "999999"), "no positions for so long a context"),
        (("--operator", "attention=magic"), "no implementation magic"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", MENAGERIE, "--prompt", "What?", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_serve_prints_its_url_and_stops_on_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firstlight.workbench", "serve", MENAGERIE, "--port", "0", "--json"]
    file = tmp_path / "r.json"
    served = subprocess.Popen([*command, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        url, _, rest = served.stdout.readline().partition("  ")
        assert rest == "serves menagerie on 1 ranks\n"
        assert json.loads(file.read_text())["metrics"]["url"]["value"] == url
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"] == "menagerie"
        pids = [beat["pid"] for beat in httpx.get(f"{url}/health", timeout=PATIENCE_S).json()["ranks"]]
        served.send_signal(signal.SIGINT)
        _, err = served.communicate(timeout=PATIENCE_S)
    finally:
        served.kill()
    assert served.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    gone(pids)


def test_preprocess_writes_what_goes_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from firstlight.engine.weights.files.safetensors_file import read

    file, report = tmp_path / "in.safetensors", tmp_path / "r.json"
    words = [
        "preprocess",
        MENAGERIE,
        "--prompt",
        "What animal is this?",
        "--image",
        str(PICTURES / "cat.png"),
        "--chat",
    ]
    assert main([*words, "--out", str(file), "--json", str(report), "-q"]) == 0
    tensors = read(file)
    assert set(tensors) == {"input_ids", "attention_mask", "pixel_values"}
    rows = {row["name"]: row for row in json.loads(report.read_text())["tables"]["tensors"]}
    assert rows["pixel_values"]["shape"] == "1 x 3 x 64 x 64"


def test_doctor_says_what_was_chosen_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--checkpoint", MENAGERIE, "--json", "-", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["tables"]["operators_cpu_bf16"]
    assert {"attention", "linear", "rms_norm", "moe"} <= {row["operator"] for row in rows}
    for row in rows:
        assert row["chosen"]
        assert row["why"]
    assert len({row["why"] for row in rows}) > 2, "a reason that is always the same says nothing"
    lacking = {row["operator"] for row in rows if row["not_possible"]}
    assert lacking == {name for row in report["tables"]["not_possible_cpu_bf16"] for name in row["of"]}
    assert report["metrics"]["threads"]["value"] >= 1
    assert report["tables"]["devices"][0]["device"] == "cpu"
