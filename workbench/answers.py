"""Whether an answer looks like one: not empty, not a loop, not gibberish. Plain functions over text and tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

FEWEST_REPEATS = 4
SHORTEST_LOOP = 12  # tokens that repeats must cover to count
LOOP_SHARE = 0.5  # of the answer
UNREADABLE_SHARE = 0.05
LEAST_MEAN_LOGPROB = -2.5
"""Nats. Greedy tokens of a sound model lie near -0.5, those of random weights near -log(vocabulary)."""


def loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Period and count of a block that the end of the answer repeats, if the repeats are most of it; else None."""
    length = len(tokens)
    for period in range(1, length // FEWEST_REPEATS + 1):
        same = 0
        while same + period < length and tokens[length - 1 - same] == tokens[length - 1 - same - period]:
            same += 1
        covered = same + period
        if covered // period >= FEWEST_REPEATS and covered >= max(SHORTEST_LOOP, LOOP_SHARE * length):
            return period, covered // period
    return None


def unreadable_share(text: str) -> float:
    """The part of the characters that nobody writes: replacement characters, controls, unassigned, private."""
    if not text:
        return 0.0
    return sum(_is_unreadable(character) for character in text) / len(text)


def _is_unreadable(character: str) -> bool:
    if character == "\ufffd":
        return True
    return unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in "\n\r\t"


def problem(text: str, tokens: Sequence[int], mean_logprob: float | None) -> str | None:
    """Why an answer is not one, or None."""
    if not text.strip():
        return "empty"
    found = loop(tokens)
    if found is not None:
        return f"a loop: the last {found[0]} tokens {found[1]} times"
    share = unreadable_share(text)
    if share > UNREADABLE_SHARE:
        return f"gibberish: {100 * share:.0f} % of the characters are not text"
    if mean_logprob is not None and mean_logprob < LEAST_MEAN_LOGPROB:
        return f"gibberish: the model itself gives its words {mean_logprob:.2f} nats a token"
    return None
