"""Where ranks are placed: routes to others, hosts by name, and what is refused before anything is started."""

import os
import sys

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.cluster import RayRanks, _hosts_of_ranks, _refuse_too_wide, use_route_to
from firstlight.engine.parallel.mesh import Mesh

NODES = [
    {
        "NodeManagerAddress": f"10.0.0.{i}",
        "NodeManagerHostname": name,
        "NodeName": f"10.0.0.{i}",
        "Resources": {"CPU": 4.0},
    }
    for i, name in enumerate(("a", "b", "twin", "twin"))
]


def test_the_interface_is_the_one_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "kept")
    assert use_route_to("127.0.0.1", 29500) == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "kept", "what the user named stays"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_route_to("127.0.0.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert use_route_to("no-such-host.invalid", 29500) is None


def test_ranks_go_to_hosts_in_order_with_tp_within_one() -> None:
    mesh = Mesh(tp=2, pp=2)
    assert _hosts_of_ranks(mesh, ("b", "a"), NODES) == ["10.0.0.1", "10.0.0.1", "10.0.0.0", "10.0.0.0"]
    assert _hosts_of_ranks(mesh, ("10.0.0.2",), NODES) == ["10.0.0.2"] * 4
    assert _hosts_of_ranks(mesh, ("auto",), NODES) == [None] * 4


@pytest.mark.parametrize(
    ("mesh", "hosts", "why"),
    [
        (Mesh(tp=2), ("a", "c"), "c names no node"),
        (Mesh(tp=2), ("twin",), "twin names several nodes"),
        (Mesh(tp=2), ("a", "b"), "does not divide over 2 hosts"),
        (Mesh(pp=3), ("a", "b"), "does not divide over 2 hosts"),
    ],
)
def test_hosts_that_do_not_do_are_refused(mesh: Mesh, hosts: tuple[str, ...], why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        _hosts_of_ranks(mesh, hosts, NODES)
    assert caught.value.findings[0].next


def test_a_tp_group_that_no_node_could_hold_is_not_waited_for() -> None:
    _refuse_too_wide(Mesh(tp=4, pp=8), {"CPU": 1.0}, NODES)
    with pytest.raises(Refused, match="no node of the Ray cluster has 8 CPUs") as caught:
        _refuse_too_wide(Mesh(tp=8), {"CPU": 1.0}, NODES)
    assert "--tp 4" in str(caught.value.findings[0].next)
    with pytest.raises(Refused, match="GPUs"):
        _refuse_too_wide(Mesh(), {"GPU": 1.0, "CPU": 1.0}, NODES)


def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match="not installed") as caught:
        RayRanks(Mesh(tp=2), ("a",), gpus=False)
    assert "torchrun" in str(caught.value.findings[0].next)
