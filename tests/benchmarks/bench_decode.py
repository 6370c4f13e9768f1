"""Tokens per second of decoding beside transformers' eager generate, and the share of what memory allows.

Each decoded token reads every weight once, so a step cannot be shorter than weight bytes / memory read bandwidth; with
a batch, one reading serves all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.benchmarks.common import machine, median, setting, show, spread, take_turns
from tests.benchmarks.contestants import Contestant, Firstlight, Transformers

BATCHES = (1, 16)
PROMPT_TOKENS = 64
NEW_TOKENS = 64


def main() -> None:
    from firstlight.engine.weights.memory import measure_read_bandwidth

    given = setting(__doc__)
    torch.set_num_threads(given.threads)
    ours = Firstlight(given.checkpoint, max(BATCHES), PROMPT_TOKENS + NEW_TOKENS, threads=given.threads)
    contestants: list[Contestant] = [ours, Transformers(given.checkpoint)]
    rows = []
    for batch in BATCHES:
        runs: dict[str, Callable[[], float]] = {
            one.name: partial(one.decode_rate, batch, PROMPT_TOKENS, NEW_TOKENS) for one in contestants
        }
        figures = take_turns({**runs, "bandwidth": measure_read_bandwidth}, given.repeats)
        bandwidth = median(figures["bandwidth"])
        for one in contestants:
            rate = median(figures[one.name])
            rows.append(
                {
                    "batch": batch,
                    "engine": one.name,
                    "tokens/s": round(rate, 1),
                    "lowest to highest": spread(figures[one.name]),
                    "ratio": round(rate / median(figures["transformers"]), 2),
                    "step ms": round(batch / rate * 1e3, 2),
                    "limit ms": round(ours.weight_bytes / bandwidth * 1e3, 2),
                    "of the limit": f"{ours.weight_bytes / bandwidth * rate / batch:.0%}",
                }
            )
    about = {**machine(given.threads), "weight_mb": round(ours.weight_bytes / 1e6, 1), "prompt": PROMPT_TOKENS}
    show("Decode", rows, about, given.json_file)


if __name__ == "__main__":
    main()
