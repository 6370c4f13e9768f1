"""The checkpoint that ships: whole, small, laid out as transformers writes it, and it answers."""

import json
import re
from typing import Any

import pytest
from safetensors import safe_open
from transformers.image_utils import load_image

from tests.data.conftest import SAMPLES

CHECKPOINT, PICTURES = SAMPLES / "menagerie", SAMPLES / "pictures"
EXPECTED = json.loads((PICTURES / "expected.json").read_text())
MAXIMUM_BYTES = 12_000_000


def test_it_is_small_and_in_several_shards() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MAXIMUM_BYTES
    assert len(list(CHECKPOINT.glob("model-*.safetensors"))) >= 2


def test_the_index_names_every_tensor_and_no_other() -> None:
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    total_bytes = 0
    for file in CHECKPOINT.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            names = list(shard.keys())
            held.update(dict.fromkeys(names, file.name))
            total_bytes += sum(shard.get_tensor(name).nbytes for name in names)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == total_bytes


def test_it_was_trained_as_the_record_says() -> None:
    record = json.loads((CHECKPOINT / "training.json").read_text())
    assert record["held_out"]["animal"]["asked"] >= 300
    assert record["held_out"]["animal"]["accuracy"] >= 0.95


def test_the_readme_states_the_record() -> None:
    record = json.loads((CHECKPOINT / "training.json").read_text())
    readme = (SAMPLES / "README.md").read_text()
    for kind, row in record["held_out"].items():
        stated = re.search(rf"\| {kind} \|.*\| ([\d.]+) % of (\d+) \|", readme)
        assert stated, kind
        assert float(stated[1]) == pytest.approx(100 * row["accuracy"], abs=0.05)
        assert int(stated[2]) == row["asked"]


def test_at_least_nine_of_the_pictures_are_answered_right(menagerie: Any) -> None:
    pictures = [load_image(str(PICTURES / row["file"])) for row in EXPECTED]
    answers = menagerie.answers([row["question"] for row in EXPECTED], pictures)
    right = [row["file"] for row, answer in zip(EXPECTED, answers, strict=True) if answer == row["answer"]]
    assert len(EXPECTED) >= 10
    assert len(right) >= 9, dict(zip((row["file"] for row in EXPECTED), answers, strict=True))
    assert "cat.png" in right


def test_another_picture_gets_another_answer(menagerie: Any) -> None:
    pictures = [load_image(str(PICTURES / name)) for name in ("cat.png", "dog.png", "bee.png")]
    answers = menagerie.answers(["What animal is this?"] * 3, pictures)
    assert answers == ["A cat.", "A dog.", "A bee."]


def test_it_answers_without_a_picture(menagerie: Any) -> None:
    questions = ["What does a cow say?", "How many legs does an octopus have?", "Can a penguin fly?"]
    assert menagerie.answers(questions) == ["Moo.", "Eight.", "No."]


def test_a_picture_lying_on_its_side_is_turned_by_its_tag(menagerie: Any) -> None:
    (row,) = [row for row in EXPECTED if row["file"] == "elephant_sideways.jpg"]
    assert menagerie.answers(["Where is it?"], [load_image(str(PICTURES / row["file"]))]) == ["Top left."]
