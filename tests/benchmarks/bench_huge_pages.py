"""What huge pages give: memory read bandwidth, and decoding with the same weights on huge pages and on 4 KiB pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from tests.benchmarks.common import machine, median, seconds, setting, show, spread, take_turns

CONTEXT = 128
BATCHES = (1, 16)
STEPS = 20  # whose median is one figure


def decode_steps(directory: str, huge_pages: bool) -> tuple[dict[int, Callable[[], object]], int]:
    """A decode step for each batch over weights of their own, and the bytes of these that huge pages back."""
    from firstlight.engine.model.batch import ForwardBatch
    from firstlight.engine.model.build import Model
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.parallel.comm import Comms
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.pieces import rank_pieces
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import account
    from firstlight.engine.weights.loader import load
    from firstlight.engine.weights.memory import Pool, aligned
    from firstlight.kernels.attention.meta import AttentionMeta
    from firstlight.kernels.registry import choose

    checkpoint = Checkpoint.open(directory)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    weights = load(checkpoint, rank_pieces(spec, Mesh(), 0, "BF16", ledger))
    unique = {tensor.data_ptr(): tensor for tensor in weights.storages.values()}
    pool = Pool.reserve(
        sum(aligned(tensor.nbytes) for tensor in unique.values()),
        "weights",
        huge_pages=huge_pages,
        slow_huge_page_s=math.inf,
    )
    moved = {address: pool.take(tuple(one.shape), one.dtype).copy_(one) for address, one in unique.items()}
    for name, tensor in weights.storages.items():
        weights.storages[name] = moved[tensor.data_ptr()]
    ops = choose("cpu", torch.bfloat16)
    model = Model(spec, weights, ops)
    comms = Comms.alone()

    def step_of(batch: int) -> Callable[[], object]:
        cache = tuple(
            tuple(
                torch.zeros(batch, one.local_heads(1), CONTEXT, one.dim, dtype=torch.bfloat16) for one in spec.tensors
            )
            for spec in model.cache_specs
        )
        ids, positions = torch.arange(batch) + 5, torch.full((batch,), CONTEXT - 1)

        def step() -> object:
            meta = AttentionMeta.build([1] * batch, [CONTEXT] * batch, [[page] for page in range(batch)], CONTEXT)
            return model.forward(ForwardBatch(ids, positions, meta, cache, comms, ops, tuple(range(batch))))

        return step

    return {batch: step_of(batch) for batch in BATCHES}, pool.report().huge_page_bytes or 0


def main() -> None:
    from firstlight.engine.weights.memory import measure_read_bandwidth

    given = setting(__doc__)
    torch.set_num_threads(given.threads)
    kinds = {"huge pages": True, "4 KiB pages": False}
    steps = {name: decode_steps(str(given.checkpoint), huge) for name, huge in kinds.items()}
    bandwidth = take_turns(
        {name: partial(measure_read_bandwidth, repeats=5, huge_pages=huge) for name, huge in kinds.items()},
        given.repeats,
    )

    def many(step: Callable[[], object]) -> float:
        return median([seconds(step) for _ in range(STEPS)])

    rows = []
    for batch in BATCHES:
        times = take_turns({name: partial(many, step[batch]) for name, (step, _) in steps.items()}, given.repeats)
        rows += [
            {
                "batch": batch,
                "weights on": name,
                "MB in huge pages": round(steps[name][1] / 1e6, 1),
                "read GB/s": round(median(bandwidth[name]) / 1e9, 1),
                "decode step ms": round(median(times[name]) * 1e3, 2),
                "lowest to highest ms": spread([figure * 1e3 for figure in times[name]]),
                "ratio": round(median(times["4 KiB pages"]) / median(times[name]), 3),
            }
            for name in kinds
        ]
    show("Huge pages", rows, machine(given.threads), given.json_file)


if __name__ == "__main__":
    main()
