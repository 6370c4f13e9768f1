"""The commands that the documents name exist, and do what they say."""

import re
import subprocess

import pytest

from tests.repo.tree import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")


def _would_run(*arguments: str) -> str:
    run = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_up_is_the_ladder_on_two_ranks() -> None:
    assert "firstlight up data/samples/menagerie --tp 2" in _would_run("up")
    assert "data/samples/fetch_smollm2.py" in _would_run("up", "MODEL=smollm2")
    assert 'firstlight up "some/where" --tp 4' in _would_run("up", "MODEL=some/where", "TP=4")


def test_test_runs_every_check() -> None:
    planned = _would_run("test")
    for check in ("ruff format --check", "ruff check", "mypy -p firstlight", "pytest"):
        assert check in planned


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_targets_that_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^\s*(?:\$ )?|`)make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    assert named <= targets, f"{document} names targets that the Makefile lacks: {named - targets}"
