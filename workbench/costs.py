"""What each block of a model must read and compute for one step on one rank, from the spec: the limits of a profile.

Bytes are those of weights; of experts, those that a step of so many tokens chooses if tokens choose independently.
FLOPs are two a weight and token. Attention over the cache is not in them. No torch.
"""

from __future__ import annotations

import msgspec

from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.placement import localize
from firstlight.engine.weights.files.header import DTYPE_BITS


class BlockCost(msgspec.Struct, frozen=True, kw_only=True):
    """One block, `layers.3.mixer` and the like, in a step of some tokens on one rank."""

    weight_bytes: int
    flops: int


def block_costs(spec: ModelSpec, mesh: Mesh, dtype: str, tokens: int) -> dict[str, BlockCost]:
    """Costs by the names that a profile uses: `layers.i.mixer`, `layers.i.ffn`, `norm` (with the head behind it)."""
    sums: dict[str, list[float]] = {}
    for kind in census(spec):
        if kind.param.role in ("vision", "projector"):
            continue
        local = localize(kind.param.shape, kind.placements, mesh, Coordinates())
        assert local is not None
        elements = 1.0
        for size in local.shape:
            elements *= size
        count, share, per_token = float(kind.count), 1.0, 1.0
        if kind.param.expert is not None:
            ffn = spec.layers[kind.param.layer].experts
            assert ffn is not None
            count /= mesh.ep
            share = 1 - (1 - ffn.router.top_k / ffn.num_experts) ** tokens
            per_token = ffn.router.top_k / ffn.num_experts
        element_bytes = DTYPE_BITS[kind.param.dtype or dtype] / 8
        matrix = len(kind.param.shape) > 1 and kind.param.role != "embedding"
        for layer in kind.layers:
            name = _block(kind.param.name, layer)
            found = sums.setdefault(name, [0.0, 0.0])
            found[0] += elements * count * share * element_bytes * (kind.param.role != "embedding")
            found[1] += 2 * elements * count * per_token * tokens if matrix else 0.0
    return {name: BlockCost(weight_bytes=round(read), flops=round(flops)) for name, (read, flops) in sums.items()}


def _block(param: str, layer: int) -> str:
    """The block that a parameter belongs to; norms count with the block they stand before."""
    if not param.startswith("layers."):
        return "embed" if param.startswith("embed") else "head"
    is_mixer = any("mixer" in part for part in param.split(".")[2:5])
    return f"layers.{layer}.{'mixer' if is_mixer else 'ffn'}"
