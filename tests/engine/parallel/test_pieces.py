"""Pieces: over all ranks of a mesh they cover every tensor exactly, and on a rank they fill every storage exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param
from firstlight.engine.parallel import pieces as pieces_module
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import RankPieces, layer_elements, on_stage, rank_pieces, stages
from firstlight.engine.parallel.placement import Expert, Shard, Vocab
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.synthesize import synthesize
from tests.checkpoints import TINY

CASES = [
    ("llama", False),
    ("llama-tied", False),
    ("llama-vocab257", False),
    ("llama-biases", False),
    ("qwen3-bias", False),
    ("gemma2", False),
    ("qwen3_moe", False),
    ("qwen3_moe", True),
    ("mixtral", False),
    ("mixtral", True),
    ("deepseek_v3", False),
    ("deepseek_v3-full-q", True),
    ("llava-clip", False),
    ("llava-siglip", False),
]
MESHES = [
    Mesh(tp=tp, pp=pp, ep=ep) for tp in (1, 2, 4) for pp in (1, 2, 3) for ep in (1, 2, 4) if tp * pp * ep <= 12
] + [Mesh(dp=2, tp=2), Mesh(tp=3, attention="whole")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}{'-fused' if case[1] else ''}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Ledger, Any]:
    name, fused = request.param
    home = tmp_path_factory.mktemp("model")
    synthesize(TINY[name].config, home, fused=fused)
    checkpoint = Checkpoint.open(home)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    assert ledger.complete
    return spec, ledger, checkpoint.tensors


def possible(spec: ModelSpec) -> Iterator[Mesh]:
    found = [mesh for mesh in MESHES if not violations(spec, mesh)]
    assert len(found) >= 4
    yield from found


def test_pieces_cover_every_tensor(model: tuple[ModelSpec, Ledger, Any]) -> None:
    """Each element of each consumed tensor is read by exactly as many ranks as the placements say."""
    spec, ledger, tensors = model
    params = {param.name: param for param in spec.parameters()}
    for mesh in possible(spec):
        read: dict[str, NDArray[np.int64]] = {
            param: np.zeros(tensors[source.tensor].shape, np.int64) for param, source in ledger.sources.items()
        }
        for rank in range(mesh.world_size):
            for piece in rank_pieces(spec, mesh, rank, "F32", ledger).pieces:
                read[piece.param][tuple(slice(*cut) for cut in piece.region)] += 1
        for name, counts in read.items():
            own = tuple(slice(*cut) for cut in ledger.sources[name].region)
            expected = np.zeros_like(counts)
            expected[own] = copies(params[name], spec, mesh, tied=ledger.sources[name].tied)
            np.testing.assert_array_equal(counts, expected, err_msg=f"{name} on {mesh.describe()}")


def copies(param: Param, spec: ModelSpec, mesh: Mesh, tied: bool) -> int:
    """How many ranks hold each element of a parameter."""
    count = mesh.dp * mesh.tp * mesh.ep
    for place in param.placements:
        ranks = mesh.size(place.axis)
        if isinstance(place, Expert | Vocab) or place.units >= ranks:
            count //= ranks
        else:
            count = count // ranks * (ranks // place.units)
    return 0 if tied and mesh.pp == 1 and param.name == "head.weight" else count


def test_pieces_fill_every_storage_once(model: tuple[ModelSpec, Ledger, Any]) -> None:
    """On a rank, places do not overlap and leave nothing but vocabulary padding, which stands last."""
    spec, ledger, _ = model
    params = {param.name: param for param in spec.parameters()}
    for mesh in possible(spec):
        for rank in range(mesh.world_size):
            held = rank_pieces(spec, mesh, rank, "F32", ledger)
            for storage in held.storages:
                rows = np.zeros(storage.shape[: 2 if len(storage.shape) == 3 else 1] or (1,), np.int64)
                mine = [piece for piece in held.pieces if piece.storage == storage.name]
                for piece in mine:
                    place = rows if piece.expert is None else rows[piece.expert]
                    place[piece.row : piece.row + (piece.shape[0] if piece.shape else 1)] += 1
                vocab = any(isinstance(place, Vocab) for piece in mine for place in params[piece.param].placements)
                if vocab:
                    assert (np.diff(rows) <= 0).all()
                    assert set(rows) <= {0, 1}
                else:
                    assert (rows == 1).all(), storage.name
            assert [piece.param for piece in held.pieces] == sorted(
                (piece.param for piece in held.pieces), key=list(params).index
            ), "in forward order"


def test_a_rank_without_a_ledger_holds_the_same(model: tuple[ModelSpec, Ledger, Any]) -> None:
    spec, ledger, _ = model
    for mesh in possible(spec):
        for rank in (0, mesh.world_size - 1):
            with_ledger = rank_pieces(spec, mesh, rank, "BF16", ledger)
            assert rank_pieces(spec, mesh, rank, "BF16").storages == with_ledger.storages
            assert with_ledger.nbytes == sum(with_ledger.bytes_by_role().values())


def test_a_head_of_its_own_under_a_flag_that_ties_is_held(tmp_path: Any) -> None:
    config = TINY["llama-tied"].config
    synthesize(config, tmp_path, tied=False)
    checkpoint = Checkpoint.open(tmp_path)
    spec, matcher = FAMILIES.describe(config)
    ledger = account(checkpoint, spec, matcher)
    held = rank_pieces(spec, Mesh(), 0, "F32", ledger)
    assert not held.tied_head
    assert {piece.tensor for piece in held.pieces if piece.param == "head.weight"} == {"lm_head.weight"}


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_tied_head_stands_on_the_last_stage_too(pp: int) -> None:
    spec, _ = FAMILIES.describe(TINY["llama-tied"].config)
    ranks = [rank_pieces(spec, Mesh(pp=pp), rank, "F32") for rank in range(pp)]
    assert "embed.weight" in names(ranks[0])
    assert ("head.weight" in names(ranks[-1])) == (pp > 1)
    assert ranks[0].tied_head == (pp == 1)
    assert not any("head.weight" in names(rank) for rank in ranks[:-1])


def names(held: RankPieces) -> set[str]:
    return {storage.name for storage in held.storages}


# Stages


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_stages_cover_all_layers_and_none_could_be_smaller(weights: list[int], data: st.DataObject) -> None:
    """Consecutive, not empty, and the largest is as small as any cut allows (tried by hand over all cuts)."""
    pp = data.draw(st.integers(1, len(weights)))
    cuts = pieces_module._cut(weights, pp)
    assert len(cuts) == pp
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(weights)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    assert all(stop > start for start, stop in cuts)
    assert max(sum(weights[start:stop]) for start, stop in cuts) == smallest(tuple(weights), pp)


def smallest(weights: tuple[int, ...], pp: int) -> int:
    """The least possible largest stage, by dynamic programming."""
    best = [0, *(10**9 for _ in weights)]
    for _ in range(pp):
        best = [10**9] + [
            min(max(best[cut], sum(weights[cut:stop])) for cut in range(stop)) for stop in range(1, len(weights) + 1)
        ]
    return best[-1]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "llava-clip", "gemma2"])
def test_a_census_counts_what_there_is(name: str) -> None:
    spec, _ = FAMILIES.describe(TINY[name].config)
    params = spec.parameters()
    assert sum(kind.elements for kind in census(spec)) == sum(param.elements for param in params)
    assert sum(kind.count * len(kind.layers) for kind in census(spec)) == len(params)
    assert sum(layer_elements(spec)) == sum(param.elements for param in params)
    for layer in range(spec.num_layers):
        mine = [param for param in params if param.layer == layer]
        found = [kind for kind in census(spec) if layer in kind.layers]
        assert sum(kind.count for kind in found) == len(mine)
        assert sum(kind.param.elements * kind.count for kind in found) == sum(param.elements for param in mine)
    cuts = stages(spec, 2)
    for param in params:
        homes = [index for index, cut in enumerate(cuts) if on_stage(param, cut, spec.num_layers)]
        assert len(homes) == 1
        assert param.layer != FIRST_STAGE or homes == [0]
        assert param.layer != LAST_STAGE or homes == [1]


def test_shards_of_the_spec_divide_the_dims_they_cut() -> None:
    for case in TINY.values():
        spec, _ = FAMILIES.describe(case.config)
        for kind in census(spec):
            for place in kind.placements:
                if isinstance(place, Shard):
                    assert kind.param.shape[place.dim] % place.units == 0
                assert math.prod(kind.param.shape) > 0
