"""Deltas put together are the whole text: whole characters, nothing of the prompt, stop strings held back."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from firstlight.engine.inputs.detokenizer import REPLACEMENT, Detokenizer
from firstlight.engine.inputs.tokenizer import Tokenizer
from tests.costs import within
from tests.engine.inputs.toys import save_tokenizer

CHARACTER = "🫠".encode()  # F0 9F AB A0
SETTINGS = settings(max_examples=200)


@cache
def opened(directory: Path) -> Tokenizer:
    return Tokenizer.open(directory)


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer whose id is the byte; then some merged tokens, and tokens outside of the byte alphabet."""
    from firstlight.engine.inputs.byte_pieces import byte_of_char

    vocabulary = {**byte_of_char(), "ab": 256, "Ġab": 257, "âĤ": 258, "¬x": 259, "Ġ": 32}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<image>"])
    backend.add_tokens(["two words", "日本"])
    directory = tmp_path_factory.mktemp("alphabet")
    return Tokenizer.open(save_tokenizer(backend, directory, "PreTrainedTokenizerFast", eos_token="<|end|>"))


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), stop: Sequence[str] = (), skip: bool = True
) -> tuple[list[str], str]:
    """The deltas of the tokens, and that of finish."""
    detokenizer = Detokenizer(tokenizer, prompt, stop, skip)
    return [detokenizer.push(id_) for id_ in ids], detokenizer.finish()


def expected(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int], skip: bool = True) -> str:
    """The definition: the whole text less the characters that the prompt completed."""
    whole = tokenizer.decode([*prompt, *ids], skip)
    begun = tokenizer.decode(prompt, skip)
    bytes_ = b"".join(tokenizer.token_bytes(i) for i in prompt if not (skip and i in tokenizer.special_ids))
    if _incomplete(bytes_):
        begun = begun[:-1]  # an incomplete character at the end is written as one replacement
    assert whole.startswith(begun)
    return whole[len(begun) :]


def _incomplete(data: bytes) -> int:
    """How many bytes at the end begin a character without ending it."""
    for count in range(1, 4):
        try:
            data[-count:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0 and len(data) >= count:
                return count
    return 0


def test_a_character_of_four_tokens_comes_whole(alphabet: Tokenizer) -> None:
    assert stream(alphabet, CHARACTER) == (["", "", "", "🫠"], "")


def test_a_stop_after_two_of_four_tokens_gives_one_replacement(alphabet: Tokenizer) -> None:
    assert stream(alphabet, CHARACTER[:2]) == (["", ""], REPLACEMENT)
    assert alphabet.decode(list(CHARACTER[:2])) == REPLACEMENT


def test_a_prompt_that_ends_within_a_character(alphabet: Tokenizer) -> None:
    prompt = [*b"secret ", *"€".encode()[:2]]
    deltas, last = stream(alphabet, ["€".encode()[2], *b" ok"], prompt)
    assert "".join(deltas) + last == "€ ok"
    # The character never ends: what was begun becomes one replacement with the token that shows it.
    deltas, last = stream(alphabet, list(b"ok"), prompt)
    assert (deltas, last) == ([REPLACEMENT + "o", "k"], "")
    # Nothing is generated: one replacement stands for the bytes left over, and no text of the prompt.
    assert stream(alphabet, [], prompt) == ([], REPLACEMENT)


def test_a_last_token_that_begins_with_a_space(alphabet: Tokenizer) -> None:
    ids = [*b"so", 257]
    deltas, last = stream(alphabet, ids, list(b"prompt"))
    assert ["".join(deltas), last] == ["so ab", ""]
    assert deltas[-1] == " ab"


@pytest.mark.parametrize("name", ["text", "spm"])
def test_a_space_at_the_start_of_an_answer(toys: Path, name: str) -> None:
    """After a prompt it is part of the answer; without one it is what the decoder makes of the start of a text."""
    tokenizer = opened(toys / name)
    ids = tokenizer.encode(" cat", add_special_tokens=False)
    prompt = tokenizer.encode("The", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids, prompt)[0]).lstrip() == "cat"
    assert "".join(stream(tokenizer, ids, prompt)[0]) == expected(tokenizer, ids, prompt)
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_only_the_end_of_a_long_prompt_is_read(alphabet: Tokenizer) -> None:
    prompt = list(b"x" * 400_000) + [alphabet.token_id("<image>") or 0] * 4000
    within(20, lambda: Detokenizer(alphabet, prompt), lambda: Detokenizer(alphabet, prompt[-400:]))


def test_the_cost_of_a_token_does_not_grow(alphabet: Tokenizer) -> None:
    def push_many(detokenizer: Detokenizer) -> None:
        for _ in range(3000):
            detokenizer.push(97)

    long = Detokenizer(alphabet, (), ("never",))
    for _ in range(10):
        push_many(long)
    within(4, lambda: push_many(long), lambda: push_many(Detokenizer(alphabet, (), ("never",))))


@SETTINGS
@given(
    prompt=st.lists(st.integers(0, 263), max_size=6),
    ids=st.lists(st.integers(0, 263), max_size=12),
    skip=st.booleans(),
)
def test_any_bytes(alphabet: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> None:
    deltas, last = stream(alphabet, ids, prompt, skip=skip)
    assert "".join(deltas) + last == expected(alphabet, ids, prompt, skip)
    assert last in ("", REPLACEMENT)


@SETTINGS
@given(text=st.text(max_size=12), cut=st.integers(0, 30))
@pytest.mark.parametrize("name", ["text", "spm"])
def test_any_text_cut_anywhere(toys: Path, name: str, text: str, cut: int) -> None:
    """Between prompt and answer wherever a token ends, also within a character."""
    tokenizer = opened(toys / name)
    ids = tokenizer.encode(text)
    prompt, ids = ids[:cut], ids[cut:]
    deltas, last = stream(tokenizer, ids, prompt)
    assert not last
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(deltas)
    # The library writes a whole run of single bytes as replacements when its last character is incomplete: count bytes.
    data = b"".join(tokenizer.token_bytes(id_) for id_ in prompt)
    begun = data[: len(data) - _incomplete(data)].decode().removeprefix(" " if name == "spm" else "")
    assert begun + "".join(deltas) == tokenizer.decode([*prompt, *ids])


@SETTINGS
@given(ids=st.lists(st.integers(3, 258), min_size=1, max_size=10))
def test_any_bytes_of_a_fallback(toys: Path, ids: list[int]) -> None:
    """Equal to the library's text where the bytes are valid; else each invalid sequence is one replacement."""
    tokenizer = opened(toys / "spm")
    data = b"".join(tokenizer.token_bytes(id_) for id_ in ids)
    deltas, last = stream(tokenizer, ids)
    whole = data.decode(errors="replace").removeprefix(" ")
    assert "".join(deltas) + last == whole
    if REPLACEMENT not in whole:
        assert whole == tokenizer.decode(ids)


STOPS = st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3)


@SETTINGS
@given(pieces=st.lists(st.text("abc ", max_size=4), max_size=8), stops=STOPS)
def test_stop_strings_however_the_text_is_cut(alphabet: Tokenizer, pieces: list[str], stops: list[str]) -> None:
    """Reference: the whole text, cut before the stop that is complete first. Held-back text comes at the end."""
    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    detokenizer = Detokenizer(alphabet, (), stops)
    given_out = ""
    for piece in pieces:
        for byte in piece.encode():
            given_out += detokenizer.push(byte)
            assert not any(stop in given_out for stop in stops)
    given_out += detokenizer.finish()
    if ends:
        _, start, stop = min(ends)
        assert (given_out, detokenizer.stopped, detokenizer.stop_string) == (whole[:start], True, stop)
    else:
        assert (given_out, detokenizer.stopped) == (whole, False)


def test_a_stop_string_within_and_across_tokens(alphabet: Tokenizer) -> None:
    # "ab" is one token, the stop begins within it and ends in the next.
    deltas, last = stream(alphabet, [256, *b"c!"], stop=["bc"])
    assert (deltas, last) == (["a", "", ""], "")
    # What could have become a stop string comes out when it does not.
    deltas, last = stream(alphabet, [256, *b"d!"], stop=["bc"])
    assert (deltas, last) == (["a", "bd", "!"], "")
    # And at the end of the generation.
    assert stream(alphabet, [256], stop=["bc"]) == (["a"], "b")


def test_nothing_after_a_stop(alphabet: Tokenizer) -> None:
    detokenizer = Detokenizer(alphabet, (), ("b",))
    assert [detokenizer.push(byte) for byte in b"abab"] == ["a", "", "", ""]
    assert detokenizer.finish() == detokenizer.finish() == ""
    assert detokenizer.stop_string == "b"


def test_a_stop_string_of_many_bytes(alphabet: Tokenizer) -> None:
    deltas, last = stream(alphabet, list("a🫠b".encode()), stop=["🫠"])
    assert "".join(deltas) + last == "a"


def test_special_tokens_are_skipped_or_shown(alphabet: Tokenizer) -> None:
    end = alphabet.token_id("<|end|>")
    assert end is not None
    assert "".join(stream(alphabet, [97, end, 98])[0]) == "ab"
    assert "".join(stream(alphabet, [97, end, 98], skip=False)[0]) == "a<|end|>b"
    # A special token within a character does not break it.
    half = [*CHARACTER[:2], end, *CHARACTER[2:]]
    assert "".join(stream(alphabet, half)[0]) == alphabet.decode(half) == "🫠"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Decoders that look at neighbours: WordPiece, words joined by spaces with and without a clean-up, Metaspace."""
    root = tmp_path_factory.mktemp("words")
    texts = ("<unk>", "it", "'s", "n't", ".", ",", "?", "we", "do", "'", "##ing", "##s", "▁cat", "▁dog", "s", "▁")
    vocabulary = {word: i for i, word in enumerate(texts)}
    made = {}
    for name, decoder, options in (
        ("wordpiece", decoders.WordPiece(), {}),
        ("joined", None, {}),
        ("cleaned", None, {"clean_up_tokenization_spaces": True}),
        ("metaspace", decoders.Metaspace(), {}),
        ("metaspace-never", decoders.Metaspace(prepend_scheme="never"), {}),
    ):
        backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if decoder is not None:
            backend.decoder = decoder
        made[name] = Tokenizer.open(save_tokenizer(backend, root / name, "PreTrainedTokenizerFast", **options))
    return made


@SETTINGS
@given(ids=st.lists(st.integers(0, 15), max_size=10))
@pytest.mark.parametrize("name", ["wordpiece", "joined", "cleaned", "metaspace", "metaspace-never"])
def test_decoders_that_look_at_neighbours(words: dict[str, Tokenizer], name: str, ids: list[int]) -> None:
    tokenizer = words[name]
    deltas, last = stream(tokenizer, ids)
    assert "".join(deltas) + last == tokenizer.decode(ids)
    assert (tokenizer.pieces is not None) == name.startswith("metaspace")
