"""Streams text from token ids: whole characters only, without the prompt, stop strings held back.

The contract: the deltas of all `push` calls and of `finish`, put together, are
`decode(prompt + generated)` without the characters that `decode(prompt)` already completed. A character is given out
with the token that completes it, so a character begun by the prompt belongs to the answer. U+FFFD is given out only for
bytes that no later token can complete; what is left incomplete at the end becomes one U+FFFD.

Where a tokenizer falls back to single bytes (`<0xE2>`), the tokenizers library decodes a run of such bytes as a whole
and turns every byte of an invalid run, valid neighbours included, into U+FFFD. Here valid characters of such a run are
kept and each invalid sequence is one U+FFFD; texts without invalid bytes are the same.

Cost: constant work per token for the decoders in `byte_pieces`. For other decoders (WordPiece, a clean-up of spaces)
the generated text is decoded again on every token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from firstlight.engine.inputs.byte_pieces import Pieces
    from firstlight.engine.inputs.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CLEAN_UP = 4  # characters of the longest pattern in tokenizer.CLEAN_UP


class Detokenizer:
    """The text of one generation, token by token.

    `stop`: strings that end the answer; the text before the first one is given out, the stop string itself is not, and
    text that could still grow into a stop string is held back. The stop that is complete first counts, the longest of
    those that end together. `stopped` is then true and `stop_string` names it; later tokens add nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        assert all(stop), "an empty stop string would stop before the first token"
        self._stream: _Stream
        if tokenizer.pieces is not None:
            self._stream = _ByteStream(tokenizer, tokenizer.pieces, prompt_ids, skip_special_tokens)
        else:
            self._stream = _DecodedAgain(tokenizer, prompt_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._held = ""
        self._finished = False
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    def push(self, id_: int) -> str:
        """The text that the next token adds; often empty."""
        assert not self._finished, "push after finish"
        return "" if self.stopped else self._release(self._stream.push(id_))

    def finish(self) -> str:
        """The text that was held back, at the end of the generation. A second call adds nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        delta = self._release(self._stream.finish()) + self._held
        self._held = ""
        return delta

    def _release(self, text: str) -> str:
        """Appends new text; returns what cannot be part of a stop string."""
        if not self._stop:
            return text
        if not text:
            return ""
        pending = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := pending.find(stop)) >= 0]
        if found:
            _, start, self.stop_string = min(found)
            self._held = ""
            return pending[:start]
        kept = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - kept :]
        return pending[: len(pending) - kept]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _Stream(Protocol):
    def push(self, id_: int) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, pieces: Pieces, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = True
        self._to_strip = pieces.strip
        self._start(prompt_ids)

    def _start(self, prompt_ids: Sequence[int]) -> None:
        """Brings the decoder to its state after the prompt, whose last four bytes (one character) matter."""
        tail = b""
        position = len(prompt_ids)
        while position and len(tail) < 4 + self._pieces.strip:
            position -= 1
            tail = self._bytes(prompt_ids[position], is_first=False) + tail
        if position:
            self._is_first, self._to_strip = False, 0
        else:  # the whole prompt is that short: its start counts
            tail = b"".join(self._take(id_) for id_ in prompt_ids)
        self._strip(self._decode(tail))

    def _bytes(self, id_: int, is_first: bool) -> bytes:
        token = None if id_ in self._skipped else self._tokenizer.token(id_)
        if token is None:
            return b""
        return self._pieces.first_bytes_of(token) if is_first else self._pieces.bytes_of(token)

    def _take(self, id_: int) -> bytes:
        piece = self._bytes(id_, self._is_first)
        if self._is_first and id_ not in self._skipped and self._tokenizer.token(id_) is not None:
            self._is_first = False
        return piece

    def _strip(self, text: str) -> str:
        """Strips the leading spaces of the text, once."""
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                self._to_strip -= 1
                text = text[1:]
        return text

    def push(self, id_: int) -> str:
        return self._strip(self._decode(self._take(id_)))

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        pending = self._decoder.getstate()[0]
        if pending[:1] == b"\xed" and pending[1:2] >= b"\xa0":
            # The beginning of a surrogate, which is no character: Python waits for its third byte, in vain.
            text += self._decoder.decode(b"", final=True)
        return text

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))


class _DecodedAgain:
    """Decodes the whole text again for every token, for decoders that are not token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(prompt_ids)
        self._given = len(tokenizer.decode(self._ids, skip_special).rstrip(REPLACEMENT))

    def push(self, id_: int) -> str:
        self._ids.append(id_)
        return self._upto(hold=True)

    def finish(self) -> str:
        return self._upto(hold=False)

    def _upto(self, hold: bool) -> str:
        text = self._tokenizer.decode(self._ids, self._skip_special)
        end = len(text)
        if hold:
            end = len(text.rstrip(REPLACEMENT))
            if self._tokenizer.clean_up and (space := text.rfind(" ", max(0, end - LONGEST_CLEAN_UP), end)) >= 0:
                end = space
        delta = text[self._given : end]
        self._given = max(self._given, end)
        return delta
