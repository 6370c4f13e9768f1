"""What a profile asks for and what it says, as data. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

if TYPE_CHECKING:
    from firstlight.engine.serving.scheduler import Limits


class ProfileCommand(msgspec.Struct, frozen=True, tag=True):
    """`batch` sequences: prompts of `prompt_tokens`, then `decode_steps` steps of a token each; `repeats` prefills."""

    prompt_tokens: int = 128
    decode_steps: int = 8
    batch: int = 1
    repeats: int = 3


def profile_command(limits: Limits, prompt_tokens: int, decode_steps: int, batch: int) -> ProfileCommand:
    """Checks everything that could fail on a rank, so that no rank is lost to it; raises `Refused` (bad-request)."""
    room = limits.max_context - 1  # the step that warms up is decoded too
    for name, value, most in (
        ("prompt_tokens", prompt_tokens, room),
        ("decode_steps", decode_steps, room),
        ("prompt_tokens and decode_steps together", prompt_tokens + decode_steps, room),
        ("batch", batch, limits.max_batch),
    ):
        if not 1 <= value <= most:
            message = f"{name} is out of range for a profile"
            next_ = "correct the request, or start with a larger max_context or max_batch"
            raise Refused(fatal("bad-request", message, expected=f"1 to {most}", found=str(value), next=next_))
    return ProfileCommand(prompt_tokens, decode_steps, batch)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time within a step; `start_ms` counts from the step's start on the same rank."""

    name: str
    kind: str  # compute: a block, with the collectives in it; collective: one call
    start_ms: float
    duration_ms: float
    nbytes: int = 0


class PhaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step on one rank, medians over steps, in milliseconds.

    `undisturbed_ms` is a step that nothing times. `communication_ms`: what the same collectives would take if nobody
    came late (the fastest call of each kind and size); `waiting_ms`: the rest of the time in collectives.
    `operators_ms` holds the timed operators; what is left of compute (linear layers mostly) is `other`. `timeline` is
    that of the last timed step.
    """

    tokens: int
    undisturbed_ms: float
    total_ms: float
    compute_ms: float
    communication_ms: float
    waiting_ms: float
    communication_bytes: int
    layers_ms: dict[str, float]
    operators_ms: dict[str, float]
    collectives: dict[str, int]
    timeline: tuple[Span, ...] = ()


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's prefill and decode."""

    rank: int
    prefill: PhaseProfile
    decode: PhaseProfile
