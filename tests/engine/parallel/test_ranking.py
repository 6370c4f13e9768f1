"""Objectives rank layouts by what they say: no layout that fits is better than the chosen one."""

import itertools
import json
import math
from functools import lru_cache
from importlib import resources

import msgspec
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.estimate import Roofline
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.layouts import Layouts, Objective
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.plan import make_plan
from firstlight.engine.parallel.ranking import Candidate, Ranker, reason, shown
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.registry import stored_format
from tests.engine.weights.files import LLAMA

CLUSTERS = ("8xH200", "2x8xH100", "4xB200")
MODELS = ("deepseek-v3", "mixtral-8x22b", "llama-3.1-405b")


@lru_cache(maxsize=16)
def layouts(name: str, cluster: str) -> Layouts:
    config = json.loads(resources.files("firstlight.data").joinpath("models", f"{name}.json").read_text())
    spec, matcher = FAMILIES.describe(config)
    on = parse_cluster(cluster)
    stored = stored_format(config, spec.dtype, matcher.rules)
    return Layouts(spec, stored, on, int(on.device.memory_bytes * 0.85), 4096, 2, False)


def everything(ranker: Ranker, concurrency: int) -> list[Candidate]:
    """Every layout of up to 16 stages that fits, one replica or as many as there is room for."""
    where = ranker.layouts
    found = []
    for tp, ep, pp in itertools.product(where.widths, where.experts, range(1, 17)):
        devices = tp * ep * pp
        if devices > where.cluster.count or pp > where.spec.num_layers:
            continue
        for dp in {1, min(where.cluster.count // devices, concurrency)}:
            one = ranker.candidate(Mesh(tp=tp, ep=ep, pp=pp, dp=dp), concurrency)
            if one.largest_bytes <= where.usable_bytes:
                found.append(one)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("concurrency", [1, 24])
def test_nothing_that_fits_is_better_than_the_first(name: str, cluster: str, concurrency: int) -> None:
    where = layouts(name, cluster)
    ranker = Ranker(where, Roofline(where.spec, where.cluster), concurrency)
    all_of_them = everything(ranker, concurrency)
    for objective in ("latency", "throughput", "devices"):
        ranking = ranker.ranked(objective)
        assert bool(ranking) == bool(all_of_them)
        for one in ranking:
            assert one.largest_bytes <= where.usable_bytes
            assert one.devices <= where.cluster.count
        if not ranking:
            continue
        best = ranking[0]
        if objective == "latency":
            assert best.ms_per_token == pytest.approx(min(one.ms_per_token or 0.0 for one in all_of_them), rel=0.01)
        elif objective == "throughput":
            assert best.tokens_per_s == pytest.approx(max(one.tokens_per_s or 0.0 for one in all_of_them), rel=0.01)
        else:
            assert best.devices == min(one.devices for one in all_of_them)


def test_objectives_differ_and_say_why() -> None:
    where = layouts("mixtral-8x22b", "8xH200")
    plans = {}
    for objective in ("latency", "throughput", "devices"):
        plans[objective] = make_plan(
            where.spec, where.stored, where.cluster, objective=objective, concurrency=None, context=4096
        )
        plan = plans[objective]
        assert plan.fits
        assert plan.mesh == plan.ranking[0].mesh
        assert plan.estimate == plan.ranking[0]
        rows = shown(plan.ranking)
        reasons = [reason(one, rows[0], plan.objective) for one in rows]
        assert sum("least" in why or "most tokens" in why or "fewest" in why for why in reasons) == 1
        assert all("bound by" in why for why in reasons)
    assert plans["latency"].mesh.tp == 8
    assert plans["devices"].mesh.world_size == 3 == plans["devices"].devices_needed
    crowd, single = plans["throughput"], plans["latency"]
    assert crowd.concurrency > single.concurrency == 1
    assert (crowd.estimate.tokens_per_s or 0) > 10 * (single.estimate.tokens_per_s or 0)
    assert (crowd.estimate.ms_per_token or 0) > (single.estimate.ms_per_token or 0)


def test_a_replica_holds_as_many_sequences_as_was_said() -> None:
    where = layouts("mixtral-8x22b", "8xH200")
    room = where.most_sequences((4, 1, 1), 10_000)
    assert where.largest((4, 1, 1), room) <= where.usable_bytes < where.largest((4, 1, 1), room + 1)
    assert where.most_sequences((1, 1, 1), 10_000) == 0
    assert where.shallowest(1, 1, 1) == 3
    assert where.shallowest(8, 8, 1) is None, "64 ranks on 8 devices"


@pytest.mark.parametrize("objective", ["latency", "throughput", "devices"])
def test_without_facts_layouts_are_compared_by_size(objective: Objective) -> None:
    where = layouts("mixtral-8x22b", "8xH200")
    bare = type(where.cluster.device)(name="X", memory_bytes=where.cluster.device.memory_bytes)
    cluster = type(where.cluster)(nodes=1, per_node=8, device=bare)
    plan = make_plan(where.spec, where.stored, cluster, objective=objective, concurrency=None)
    assert plan.fits
    assert plan.ranking == ()
    assert plan.estimate.ms_per_token is None
    assert "missing" in plan.estimate.decode.bound_by


@pytest.mark.parametrize("objective", ["latency", "throughput", "devices"])
def test_attention_is_whole_by_wish_alone(objective: Objective) -> None:
    """25 heads on four devices: tp 2 and 4 where the user asks for whole mixers, and nothing else is weighed then."""
    sizes = {"num_attention_heads": 25, "num_key_value_heads": 5, "hidden_size": 100, "intermediate_size": 128}
    spec, _ = FAMILIES.describe({**LLAMA, **sizes})
    on = parse_cluster("4xH200")
    found, wished = (
        make_plan(spec, Plain("BF16"), on, objective=objective, attention=attention)  # type: ignore[arg-type]
        for attention in ("divided", "whole")
    )
    assert {one.mesh.attention for one in found.ranking} == {"divided"}
    assert {one.mesh.attention for one in wished.ranking} == {"whole"}
    assert {one.mesh.tp for one in found.ranking} == {1}
    assert {one.mesh.tp for one in wished.ranking} == {1, 2, 4}
    small = msgspec.structs.replace(on, device=msgspec.structs.replace(on.device, memory_bytes=40_000))
    tight = make_plan(spec, Plain("BF16"), small, headroom=0.0)
    assert not tight.fits
    assert all(mesh is None or mesh.attention == "divided" for mesh in (tight.mesh, tight.nearest))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wish", [Mesh(tp=7), Mesh(tp=2, pp=3), Mesh(dp=2, ep=3), Mesh(sp=2, tp=8)])
def test_the_nearest_layout_fits_and_no_other_that_fits_is_nearer(name: str, wish: Mesh) -> None:
    where = layouts(name, "2x8xH100")

    def distance(mesh: Mesh) -> float:
        ratios = ((mesh.dp, wish.dp), (mesh.pp, wish.pp), (mesh.ep, wish.ep), (mesh.sp, wish.sp), (mesh.tp, wish.tp))
        return sum(abs(math.log2(own / asked)) for own, asked in ratios)

    fitting = [
        mesh
        for tp, ep, pp, dp in itertools.product(where.widths, where.experts, range(1, 17), (1, wish.dp))
        if (mesh := Mesh(tp=tp, ep=ep, pp=pp, dp=dp)).world_size <= 16
        and max(rank.total for rank in where.ranks(mesh, 4)) <= where.usable_bytes
    ]
    found = where.nearest(wish, 4)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert distance(found) == min(map(distance, fitting))


def test_a_mesh_that_cannot_be_is_refused_with_the_nearest_that_fits() -> None:
    where = layouts("llama-3.1-405b", "2x8xH100")
    for wish in (Mesh(tp=7, pp=2), Mesh(tp=8, pp=4)):  # indivisible; more ranks than devices
        with pytest.raises(Refused) as refused:
            make_plan(where.spec, where.stored, where.cluster, wish)
        assert "nearest that fits: pp 2 x tp 8 on 16 x H100-SXM-80G" in (refused.value.findings[0].next or "")
