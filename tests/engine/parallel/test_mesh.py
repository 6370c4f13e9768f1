"""Ranks and coordinates are each other's inverse, and groups along any axes divide the world."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import AXES, HEADS, Coordinates, Groups, Mesh

_size = st.integers(1, 4)
meshes = st.builds(Mesh, dp=_size, pp=_size, ep=_size, sp=_size, tp=_size)


@given(meshes)
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    where = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(at) for at in where] == list(range(mesh.world_size))
    assert where == sorted(where, key=lambda at: [at.on(axis) for axis in AXES]), "the last axis turns fastest"
    for axis in AXES:
        assert {at.on(axis) for at in where} == set(range(mesh.size(axis)))


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_divide_the_world(mesh: Mesh, axes: set[str]) -> None:
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        where = [mesh.coordinates(rank) for rank in group]
        for axis in AXES:
            values = [at.on(axis) for at in where]
            assert len(set(values)) == (mesh.size(axis) if axis in axes else 1)


def test_neighbours_in_tp_are_neighbours_in_rank() -> None:
    mesh = Mesh(tp=4, ep=2, pp=3, dp=2)
    assert mesh.world_size == 48
    assert mesh.groups("tp")[0] == (0, 1, 2, 3)
    assert mesh.groups("ep")[0] == (0, 4)
    assert mesh.groups("pp")[0] == (0, 8, 16)
    assert mesh.groups("dp")[0] == (0, 24)
    assert mesh.groups("ep", "tp")[0] == tuple(range(8))
    assert mesh.coordinates(47) == Coordinates(dp=1, pp=2, ep=1, tp=3)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_is_at_least_one(axis: str, size: int) -> None:
    with pytest.raises(Refused, match=f"axis {axis} must be at least 1") as caught:
        Mesh(**{axis: size})
    assert caught.value.findings[0].code == "usage"


def test_words() -> None:
    assert Mesh().describe() == "1 rank"
    assert Mesh(tp=2, pp=3).describe() == "pp 3 x tp 2"
    assert Mesh(tp=2, attention="whole").describe() == "tp 2, attention whole"
    assert Mesh(pp=2, attention="whole").describe() == "pp 2", "there is nothing that would be divided"


def test_the_axis_of_heads_is_tp_or_one_rank() -> None:
    mesh = Mesh(tp=3, ep=2)
    whole = msgspec.structs.replace(mesh, attention="whole")
    everywhere = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.index(HEADS, at) for at in everywhere] == [0, 1, 2, 0, 1, 2]
    assert {whole.index(HEADS, at) for at in everywhere} == {0}
    assert (mesh.size(HEADS), whole.size(HEADS)) == (3, 1)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Mesh) == whole
    with pytest.raises(Refused, match="attention cannot be 'hole'") as caught:
        Mesh(tp=2, attention="hole")  # type: ignore[arg-type]
    assert caught.value.findings[0].expected == "divided or whole"


def test_groups_of_the_user_s_own() -> None:
    pairs = Groups(name="pairs", parts=((0, 3), (1,)))
    mesh = Mesh(tp=2, pp=2, named=(pairs,))
    assert msgspec.json.decode(msgspec.json.encode(mesh), type=Mesh) == mesh
    assert hash(mesh) != hash(Mesh(tp=2, pp=2))
    assert mesh.groups("tp") == Mesh(tp=2, pp=2).groups("tp")


@pytest.mark.parametrize(
    ("name", "parts", "why"),
    [
        ("pairs", ((0, 1), (1, 2)), "in two parts"),
        ("pairs", ((0, 4),), "rank 4"),
        ("pairs", ((-1, 0),), "rank -1"),
        ("pairs", ((0, 1), ()), "without ranks"),
        ("pairs", (), "without ranks"),
        ("tp", ((0, 1),), "taken"),
        ("world", ((0, 1),), "taken"),
        ("heads", ((0, 1),), "taken"),
    ],
)
def test_groups_that_cannot_be_are_refused(name: str, parts: tuple[tuple[int, ...], ...], why: str) -> None:
    with pytest.raises(Refused, match="cannot be made") as caught:
        Mesh(tp=4, named=(Groups(name=name, parts=parts),))
    assert why in str(caught.value.findings[0].found)


def test_an_axis_leaves_the_node_where_its_ranks_do() -> None:
    mesh = Mesh(tp=4, sp=2, pp=4)
    assert [mesh.nodes_of(axis, 8) for axis in ("tp", "sp", "ep", "pp")] == [1, 1, 1, 4]
    assert mesh.nodes_of("tp", 2) == 2
