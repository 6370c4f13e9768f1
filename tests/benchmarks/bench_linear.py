"""Linear layers of a model by every implementation, weights read from memory as they are in decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.benchmarks.common import machine, seconds, setting, show

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 2, 4, 16, 64, 512)
BEYOND_CACHES_BYTES = 96 << 20  # as many copies of a weight as need this much


def layers(shape: tuple[int, int]) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """For each implementation, the layer over several weights of one shape."""
    from firstlight.engine.weights.memory import Pool, aligned
    from firstlight.kernels.linear.table import LINEAR
    from firstlight.kernels.registry_types import Situation

    here = Situation("cpu", torch.bfloat16, {}, has_triton=False, interpret=False)
    nbytes = aligned(shape[0] * shape[1] * 2)
    copies = max(1, -(-BEYOND_CACHES_BYTES // nbytes))
    pool = Pool.reserve(copies * nbytes, "weights")
    weights = [pool.take(shape, torch.bfloat16).normal_(std=0.02) for _ in range(copies)]
    found = {}
    for one in LINEAR:
        if one.name != "measured" and one.supports(here)[0]:
            prepare = one.load()
            found[one.name] = [prepare(weight, None, ROWS) for weight in weights]
    return found


def main() -> None:
    given = setting(__doc__)
    torch.set_num_threads(given.threads)
    rows = []
    for name, shape in SHAPES.items():
        implementations = layers(shape)
        for count in ROWS:
            x_TH = torch.randn(count, shape[1]).bfloat16()
            row: dict[str, object] = {"layer": f"{name} {shape[0]}x{shape[1]}", "rows": count}
            best = dict.fromkeys(implementations, float("inf"))
            for _ in range(given.repeats):
                for implementation, linears in implementations.items():
                    taken_s = min(seconds(partial(linear, x_TH)) for linear in linears)
                    best[implementation] = min(best[implementation], taken_s)
            for implementation, taken_s in best.items():
                row[f"{implementation} us"] = round(taken_s * 1e6, 1)
            row["best GB/s"] = round(shape[0] * shape[1] * 2 / min(best.values()) / 1e9, 1)
            rows.append(row)
    show("Linear layers, best times", rows, machine(given.threads), given.json_file)


if __name__ == "__main__":
    main()
