"""What rank 0 tells the ranks to compute in one step, and what they answer: small, encodable data. No torch."""

from __future__ import annotations

import msgspec

from firstlight.engine.serving.request import Arrays, Span


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """How tokens of a sequence are chosen; `logprobs` -1: none wanted, else how many of the likeliest as well."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    logprobs: int


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that starts: its pages for its whole length, its pictures, and how long its prompt is."""

    number: int
    pages: tuple[int, ...]
    draw: Draw
    images: Arrays
    image_spans: tuple[Span, ...]
    prompt_tokens: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence to be computed, from position `start`.

    `draws` is the index of the token to be chosen after the last of them, counted from the end of the prompt; -1: the
    prompt goes on, nothing is chosen.
    """

    number: int
    start: int
    tokens: tuple[int, ...]
    draws: int


class ReplicaPlan(msgspec.Struct, frozen=True, array_like=True):
    """The part of one replica: first forget `released`, then start `admitted`, then compute `chunks` as one batch."""

    released: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`, by the chunks in it."""
        decodes = sum(1 for chunk in self.chunks if len(chunk.tokens) == 1 and chunk.draws > 0)
        return "decode" if decodes == len(self.chunks) else "mixed" if decodes else "prefill"


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One step of all replicas; every rank gets the same one."""

    number: int
    replicas: tuple[ReplicaPlan, ...]

    @property
    def phase(self) -> str:
        phases = {replica.phase for replica in self.replicas if replica.chunks}
        return phases.pop() if len(phases) == 1 else "mixed"


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The token chosen for a sequence; `top` holds (token, log probability) pairs, the best first."""

    number: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The tokens chosen in a step, over all replicas."""

    sampled: tuple[Sampled, ...]
