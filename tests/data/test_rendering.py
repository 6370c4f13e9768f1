"""Pictures and batches are functions of their seeds, and answers are right for what is drawn."""

from collections.abc import Callable
from random import Random
from types import ModuleType

import numpy as np
import pytest


def test_a_scene_is_drawn_the_same_twice(scenes: ModuleType) -> None:
    for number in range(20):
        scene = scenes.random_scene(Random(number))
        assert scene == scenes.random_scene(Random(number))
        first = np.asarray(scenes.draw(scene, 90, 64))
        scenes._glyph.cache_clear()
        assert np.array_equal(first, np.asarray(scenes.draw(scene, 90, 64)))


def test_seeds_give_different_pictures(scenes: ModuleType) -> None:
    pictures = {scenes.draw(scenes.random_scene(Random(number)), 64).tobytes() for number in range(50)}
    assert len(pictures) == 50


def test_an_animal_is_drawn_where_the_scene_says(scenes: ModuleType) -> None:
    cat = scenes.Animal("cat", "🐱", x=0.25, y=0.75, size=0.3)
    scene = scenes.Scene(background="blue", rgb=(0, 0, 255), animals=(cat,))
    pixels = np.asarray(scenes.draw(scene, 200)).astype(int)
    rows, columns = np.nonzero(np.abs(pixels - (0, 0, 255)).sum(axis=-1) > 40)
    assert abs(columns.mean() / 200 - 0.25) < 0.03
    assert abs(rows.mean() / 200 - 0.75) < 0.03
    assert abs(np.ptp(columns) / 200 - 0.3) < 0.03
    assert scenes.place_name(cat) == "bottom left"


@pytest.mark.parametrize(("width", "height"), [(64, 64), (200, 90), (90, 200)])
def test_all_animals_stay_apart_and_in_view(scenes: ModuleType, width: int, height: int) -> None:
    for number in range(100):
        scene = scenes.random_scene(Random(f"apart {number}"))
        assert 1 <= len(scene.animals) <= 4
        assert scenes.draw(scene, width, height).size == (width, height)
        for animal in scene.animals:
            assert -0.12 < animal.x - animal.size / 2 < animal.x + animal.size / 2 < 1.12
            assert all(
                np.hypot(animal.x - other.x, animal.y - other.y) > 0.2 for other in scene.animals if other is not animal
            )


def test_a_batch_is_a_function_of_its_number(
    scenes: ModuleType, script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> None:
    batches, layout = script("menagerie_batches"), script("menagerie_layout")
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    layout.train_tokenizer().save(str(file))
    first, second = (batches.ChatBatches(4, 3, 1, str(file))[2] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    other = batches.ChatBatches(4, 3, 1, str(file))[3]
    assert not np.array_equal(first.pixels_B3HW.float().numpy(), other.pixels_B3HW.float().numpy())


def test_each_question_sees_its_own_conversation_only(
    scenes: ModuleType, script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a token may attend to, in order of position, is the prompt as the chat template writes it."""
    batches, layout = script("menagerie_batches"), script("menagerie_layout")
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = layout.train_tokenizer()
    tokenizer.save(str(file))
    batch = batches.ChatBatches(1, 4, 1, str(file))[0]
    for row in range(5):
        last = [int(t) for t in (batch.labels_BT[row] == layout.END).nonzero()]
        for token in last:
            seen = (batch.mask_B1TT[row, 0, token] == 0).nonzero().flatten()
            assert batch.positions_BT[row, seen].tolist() == list(range(len(seen)))
            ids = batch.ids_BT[row, seen].tolist()
            turns = tokenizer.decode(ids, skip_special_tokens=False).split("<|user|>\n")[1:]
            assert all(turn.count("<|assistant|>") == 1 for turn in turns)
            assert ids.count(layout.IMAGE) == (layout.NUM_PATCHES if row < 4 else 0)


def test_answers_are_right_for_the_scene(scenes: ModuleType, script: Callable[[str], ModuleType]) -> None:
    questions = script("menagerie_questions")
    owl = scenes.Animal("owl", "🦉", x=0.7, y=0.2, size=0.3)
    scene = scenes.Scene(background="orange", rgb=(255, 165, 0), animals=(owl,))
    answers = {exchange.kind: exchange.answer for exchange in questions.exchanges_about(scene, Random(3))}
    assert answers["animal"] == "An owl."
    assert answers["colour"] == "Orange."
    assert answers["where"] == "Top right."
    assert answers["describe"] == "An owl on an orange background."
    pair = scenes.Scene(
        "red", (255, 0, 0), (scenes.Animal("dog", "🐶", 0.7, 0.5, 0.3), scenes.Animal("cat", "🐱", 0.3, 0.5, 0.3))
    )
    assert {e.kind: e.answer for e in questions.exchanges_about(pair, Random(3))}["pair"] == "A cat and a dog."


def test_every_animal_has_facts_and_no_held_out_fact_is_trained_on(script: Callable[[str], ModuleType]) -> None:
    questions, scenes, batches = (script(f"menagerie_{name}") for name in ("questions", "scenes", "batches"))
    assert set(questions.FACTS) == set(scenes.ANIMALS)
    assert len(scenes.ANIMALS) >= 20
    trained, held_out = batches.split_facts()
    assert held_out
    assert not {fact.question for fact in trained} & {fact.question for fact in held_out}
