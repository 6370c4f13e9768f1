"""Which models can divide the tokens of a step over ranks, and for which steps it is done. No torch.

Along `sp`, and along `ep` where tokens are sent to the experts they chose, each rank computes its own rows of a step:
attention gathers the keys and values of all of them, everything else looks at one token alone. A layer that carries a
state from token to token, or chooses keys by what others wrote, needs all rows in one place.
"""

from __future__ import annotations

from typing import Literal, get_args

from firstlight.engine.model.spec import MLA, Attention, LayerSpec, ModelSpec
from firstlight.engine.parallel.mesh import Mesh

ExpertExchange = Literal["auto", "reduce", "all-to-all"]
"""How tokens meet experts of other ranks: every ep rank sees all tokens and the sum is reduced, or tokens travel.

auto: all-to-all for steps with prefill and at least `EXCHANGE_ROWS` tokens a rank; the choice is by size and never by a
measurement, so that a request gives the same tokens on every start.
"""
EXCHANGES: tuple[str, ...] = get_args(ExpertExchange)
LEAST_ROWS = 8  # tokens a rank, of a step that is divided over sp at all
EXCHANGE_ROWS = 64  # tokens a rank, from which on `auto` sends tokens to experts


def undivided(spec: ModelSpec) -> str:
    """Why the tokens of a step cannot be divided for this model, by kind of layer; empty if they can."""
    reasons: dict[str, list[int]] = {}
    for index, whole in enumerate(spec.layers):
        for layer in whole.whole:
            if why := _why(layer):
                reasons.setdefault(why, []).append(index)
    return "; ".join(f"{why} in {_layers(indices)}" for why, indices in reasons.items())


def _why(layer: LayerSpec) -> str:
    if layer.per_layer is not None or layer.keys_of is not None:
        return "inputs of a layer's own, or keys of another layer"
    match layer.mixer:
        case None:
            return ""
        case Attention() | MLA() as mixer:
            chooses = getattr(mixer, "indexer", None) or getattr(mixer, "blocks", None)
            return "attention to keys that an indexer chooses" if chooses else ""
        case mixer:
            return f"{type(mixer).__name__} ({mixer.words()})"


def _layers(indices: list[int]) -> str:
    first = sorted(set(indices))
    shown = ", ".join(map(str, first[:3])) + (", ..." if len(first) > 3 else "")
    return f"{len(first)} layers ({shown})" if len(first) > 1 else f"layer {shown}"


def has_exchange(spec: ModelSpec, mesh: Mesh, exchange: str) -> bool:
    """Whether tokens may travel to experts on this mesh."""
    return mesh.ep > 1 and exchange != "reduce" and not undivided(spec)


def row_axes(spec: ModelSpec, mesh: Mesh, exchange: str, tokens: int, prefills: bool) -> tuple[str, ...]:
    """The axes (of ep and sp) over which a step of `tokens` tokens is divided; none if it is not worth it."""
    axes: list[str] = []
    ranks = mesh.ep * mesh.sp
    if has_exchange(spec, mesh, exchange):
        enough = prefills and tokens >= EXCHANGE_ROWS * ranks
        if enough or (exchange == "all-to-all" and tokens >= ranks):
            axes = ["ep", "sp"]
    if not axes and mesh.sp > 1 and prefills and tokens >= LEAST_ROWS * mesh.sp:
        axes = ["sp"]
    return tuple(axis for axis in axes if mesh.size(axis) > 1)
