"""What a profile asks for and what it says, as data. No torch."""

from __future__ import annotations

import msgspec


class ProfileCommand(msgspec.Struct, frozen=True, tag=True):
    """`batch` sequences: prompts of `prompt_tokens`, then `decode_steps` steps of a token each; `repeats` prefills."""

    prompt_tokens: int = 128
    decode_steps: int = 8
    batch: int = 1
    repeats: int = 3


class PhaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step on one rank, medians over steps, in milliseconds.

    `undisturbed_ms` is a step that nothing times. `communication_ms`: what the same collectives would take if nobody
    came late (the fastest call of each kind and size); `waiting_ms`: the rest of the time in collectives.
    `operators_ms` holds the timed operators; what is left of compute (linear layers mostly) is `other`.
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


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's prefill and decode."""

    rank: int
    prefill: PhaseProfile
    decode: PhaseProfile
