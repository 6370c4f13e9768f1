"""What generation_config.json asks for beyond ends of answers is said; what it writes without asking is not."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from firstlight.engine.inputs.generation_config import CHANGES, SAMPLING, unmet
from tests.engine.serving.conftest import MENAGERIE


def written(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """The file as transformers writes it."""
    GenerationConfig(**values).save_pretrained(tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "generation_config.json").read_text())
    return found


@pytest.mark.parametrize(
    "quiet",
    [
        {"eos_token_id": [1, 2], "pad_token_id": 0, "max_new_tokens": 32, "use_cache": True},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": []},
        {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        {"do_sample": False},
    ],
)
def test_what_asks_for_nothing_is_not_told(quiet: dict[str, Any], tmp_path: Path) -> None:
    assert not list(unmet(written(tmp_path, **quiet)))


def test_the_sample_asks_for_nothing() -> None:
    assert not list(unmet(json.loads((MENAGERIE / "generation_config.json").read_text())))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty 1.05"),
        ({"suppress_tokens": [5, 6]}, "suppress_tokens [5, 6]"),
        ({"suppress_tokens": list(range(99))}, "suppress_tokens [0, 1, 2,"),
        ({"num_beams": 4, "no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3, num_beams 4"),
        ({"stop_strings": ["."]}, "stop_strings"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id 2"),
    ],
)
def test_what_changes_the_likeliest_token_is_a_warning(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    (finding,) = unmet(written(tmp_path, **asked))
    assert (finding.code, finding.severity, finding.file) == ("generation-default", "warning", "generation_config.json")
    assert said in finding.message


def test_how_the_vendor_samples_is_a_note(tmp_path: Path) -> None:
    (finding,) = unmet(written(tmp_path, do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05))
    assert finding.severity == "note"
    assert finding.found == "temperature 0.7, top_p 0.8, top_k 20, min_p 0.05"
    assert finding.next is not None
    assert finding.next.endswith("min_p cannot be given here")


def test_the_keys_are_those_of_transformers() -> None:
    known = set(GenerationConfig().to_dict()) | {"forced_decoder_ids"}  # of earlier versions
    assert not (set(CHANGES) | set(SAMPLING)) - known
