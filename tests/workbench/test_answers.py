"""Loops, gibberish and silence are told from answers."""

import pytest

from firstlight.workbench.answers import loop, problem, unreadable_share


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([7] * 32, (1, 32)),
        ([1, 2, 3, *[8, 9] * 10], (2, 10)),
        ([1, 2, 3, 4, 5, *[6, 7, 8, 9] * 5, 6, 7], (4, 5)),
        (list(range(32)), None),
        ([5, 5, 5], None),
        ([*range(40), 1, 1, 1, 1, 1, 1], None),
        ([1, 2] * 4, None),
        ([], None),
    ],
)
def test_a_loop_is_a_block_that_most_of_the_end_repeats(tokens: list[int], found: tuple[int, int] | None) -> None:
    assert loop(tokens) == found


def test_unreadable_is_what_nobody_writes() -> None:
    assert unreadable_share("A cat.\nTwo dogs\t– 猫 🐈 ñ") == 0
    assert unreadable_share("ab\ufffd\x07") == 0.5
    assert unreadable_share("") == 0


def test_problems_are_named() -> None:
    assert problem("A cat.", (1, 2, 3), -0.1) is None
    assert problem("A cat.", (1, 2, 3), None) is None
    assert problem(" \n", (1,), -0.1) == "empty"
    assert problem("x" * 20, (4,) * 20, -0.1) == "a loop: the last 1 tokens 20 times"
    assert str(problem("\ufffd\ufffd cat", (1, 2, 3), -0.1)).startswith("gibberish: 33 %")
    assert str(problem("word salad", (1, 2, 3), -6.5)).startswith("gibberish: the model itself")
