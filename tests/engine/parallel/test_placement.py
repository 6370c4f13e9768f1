"""Placements: what the ranks hold of a parameter covers it exactly, each part as often as declared."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.placement import Expert, Shard, Vocab, localize

_small = st.integers(1, 12)


@given(units=_small, width=_small, ranks=_small, replicate=st.booleans())
def test_shards_cover_a_dim(units: int, width: int, ranks: int, replicate: bool) -> None:
    place = Shard(0, units, replicate=replicate, unit_name="heads")
    divides = units % ranks == 0 or (replicate and ranks % units == 0)
    assert (place.refusal(ranks) is None) == divides
    if not divides:
        assert place.refusal(ranks) == f"{units} heads do not divide by tp {ranks}"
        return
    mesh, size = Mesh(tp=ranks), units * width
    held: Counter[int] = Counter()
    extents = set()
    for rank in range(ranks):
        local = localize((size, 3), (place,), mesh, mesh.coordinates(rank))
        assert local is not None
        (start, stop), other = local.bounds
        assert other == (0, 3)
        assert local.shape == (stop - start, 3)
        assert start % width == stop % width == 0, "a unit is never cut"
        held.update(range(start, stop))
        extents.add(stop - start)
    assert len(extents) == 1
    assert held == dict.fromkeys(range(size), max(1, ranks // units))


@given(heads=_small, group=_small, tp=_small)
def test_query_heads_meet_their_key_heads(heads: int, group: int, tp: int) -> None:
    """Query head h attends to key/value head h // group; both must be on the same rank, in step."""
    queries, keys = Shard(0, heads * group), Shard(0, heads, replicate=True)
    if queries.refusal(tp) or keys.refusal(tp):
        return
    for rank in range(tp):
        first, last = queries.bounds(heads * group, rank, tp)
        low, high = keys.bounds(heads, rank, tp)
        assert {head // group for head in range(first, last)} == set(range(low, high))
        per_key = (last - first) // (high - low)
        assert all((first + i) // group == low + i // per_key for i in range(last - first))


@given(size=st.integers(1, 60), ranks=_small)
def test_a_vocabulary_is_padded_behind_and_covered_once(size: int, ranks: int) -> None:
    mesh = Mesh(tp=ranks)
    held: Counter[int] = Counter()
    for rank in range(ranks):
        local = localize((size, 3), (Vocab(0),), mesh, mesh.coordinates(rank))
        assert local is not None
        start, stop = local.bounds[0]
        assert local.shape == (-(-size // ranks), 3)
        assert start == min(rank * local.shape[0], size), "row r of the whole is row r % extent of rank r // extent"
        assert stop - start <= local.shape[0]
        held.update(range(start, stop))
    assert held == dict.fromkeys(range(size), 1)
    assert 0 <= Vocab.padded(size, ranks) * ranks - size < ranks


@given(count=_small, ep=_small)
def test_each_expert_has_one_owner(count: int, ep: int) -> None:
    places = [Expert(index, count) for index in range(count)]
    if count % ep:
        assert places[0].refusal(ep) == f"{count} experts do not divide by ep {ep}"
        return
    mesh = Mesh(ep=ep)
    for rank in range(ep):
        mine = [place for place in places if localize((2, 2), (place,), mesh, mesh.coordinates(rank)) is not None]
        assert [place.local_index(ep) for place in mine] == list(range(count // ep))
        assert {place.owner(ep) for place in mine} == {rank}


def test_an_expert_is_cut_by_tp_as_well() -> None:
    local = localize((8, 6), (Expert(5, 8), Shard(0, 8)), Mesh(tp=2, ep=2), Coordinates(ep=1, tp=1))
    assert local is not None
    assert (local.bounds, local.shape) == (((4, 8), (0, 6)), (4, 6))


def test_without_placements_all_is_everywhere() -> None:
    local = localize((3, 4), (), Mesh(tp=2, pp=2), Coordinates(tp=1))
    assert local is not None
    assert (local.bounds, local.shape) == (((0, 3), (0, 4)), (3, 4))
