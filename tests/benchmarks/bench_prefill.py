"""Seconds from a prompt to its first token, beside transformers."""

from __future__ import annotations

from functools import partial

import torch

from tests.benchmarks.common import machine, median, setting, show, spread, take_turns
from tests.benchmarks.contestants import Contestant, Firstlight, Transformers

PROMPTS = (128, 512)


def main() -> None:
    given = setting(__doc__)
    torch.set_num_threads(given.threads)
    longest = max(PROMPTS)
    contestants: list[Contestant] = [
        Firstlight(given.checkpoint, 1, longest + 8, threads=given.threads, token_budget=longest),
        Transformers(given.checkpoint),
    ]
    rows = []
    for tokens in PROMPTS:
        figures = take_turns({one.name: partial(one.prefill_s, tokens) for one in contestants}, given.repeats)
        for one in contestants:
            taken_s = median(figures[one.name])
            rows.append(
                {
                    "tokens": tokens,
                    "engine": one.name,
                    "ms": round(taken_s * 1e3, 1),
                    "lowest to highest ms": spread([figure * 1e3 for figure in figures[one.name]]),
                    "tokens/s": round(tokens / taken_s),
                    "ratio": round(median(figures["transformers"]) / taken_s, 2),
                }
            )
    show("Prefill", rows, machine(given.threads), given.json_file)


if __name__ == "__main__":
    main()
