"""What fuzzing found, kept and run again; and a short search of the same kind that needs no fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import CORPUS, SEEDS, TARGETS

EXAMPLES = {"prompts": 20, "pictures": 20, "quantization": 30}  # of targets that read more than a header
FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_what_was_found_stays_mended(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_the_corpus_is_kept_and_small() -> None:
    assert {path.parent.name for path in FILES} == set(TARGETS)
    assert sum(path.stat().st_size for path in FILES) < 1 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_neighbours(name: str) -> None:
    """Every seed, and what a few changes to its JSON make of it."""

    @settings(max_examples=EXAMPLES.get(name, 150), database=None)
    @given(st.sampled_from(SEEDS[name]), st.integers(0, 2**32), st.integers(0, 3))
    def run(seed: bytes, number: int, times: int) -> None:
        start = 8 if name == "header" else 0
        head, text = seed[:start], seed[start:]
        if name == "header":
            length = int.from_bytes(head, "little")
            text, body = text[:length], text[length:]
        else:
            text, _, body = text.partition(b"\0")
            body = b"\0" + body if body else b""
        for step in range(times):
            text = mutate(text, number + step, 1 << 16) or text
        head = len(text).to_bytes(8, "little") if name == "header" else b""
        TARGETS[name](head + text + body)

    run()
