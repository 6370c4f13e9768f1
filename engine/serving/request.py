"""What is asked of an engine and what it answers, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_TOP_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is chosen and when it ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 mean no limit. `seed` None: the engine draws one and says so.
    `logprobs` asks for the log probability of each chosen token and of the `top_logprobs` most likely ones, under the
    model's own distribution (temperature 1, no limits). Out-of-range values are `Refused` (bad-request).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _within("max_new_tokens", self.max_new_tokens, 1, 1 << 31)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("top_k", self.top_k, 0, 1 << 31)
        _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        _within("the number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            _within("the length of a stop string in bytes", len(text.encode()), 1, MAX_STOP_BYTES)
        if self.top_p == 0.0:
            raise _bad("top_p 0 keeps no token", "more than 0, at most 1", "0")
        if self.seed is not None:
            _within("seed", self.seed, -(1 << 63), (1 << 64) - 1)


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array as plain data: dtype by numpy's name, shape, bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        return cls(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())

    def numpy(self) -> np.ndarray:
        return np.frombuffer(bytearray(self.data), dtype=np.dtype(self.dtype)).reshape(self.shape)


Arrays = dict[str, Array]
Span = tuple[int, int]
"""First position and count of the prompt's tokens that one picture fills."""


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Runs that touch as one."""
    whole: list[Span] = []
    for begin, count in spans:
        if whole and sum(whole[-1]) == begin:
            whole[-1] = (whole[-1][0], whole[-1][1] + count)
        else:
            whole.append((begin, count))
    return tuple(whole)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to be continued.

    `images` holds the processor's tensors of all pictures of the prompt; `image_spans` says which positions they fill,
    in their order. `number` is the engine's.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    images: Arrays = msgspec.field(default_factory=dict)
    image_spans: tuple[Span, ...] = ()
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise _bad("the prompt is empty", "at least one token", "0")
        for start, count in self.image_spans:
            assert 0 <= start < start + count <= len(self.prompt_ids), (start, count)


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a chosen token, and the most likely tokens with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens taken in and given out, and when: seconds since the request arrived. `number` is the engine's."""

    prompt_tokens: int
    completion_tokens: int
    queue_s: float = 0.0
    first_token_s: float | None = None
    total_s: float | None = None
    number: int = 0


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to an answer; the last one carries `finish` and `usage`, and `error` if it failed."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    seed: int | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None


def arrays_of(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """Tensors of the processor as plain data."""
    return {name: Array.of(array) for name, array in tensors.items()}


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also false for NaN
        raise _bad(f"{name} is out of range", f"{least} to {most}", str(value))


def _bad(message: str, expected: str, found: str) -> Refused:
    return Refused(fatal("bad-request", message, expected=expected, found=found, next="correct the request"))
