"""The roofline: what a step reads, and what it sends."""

import json
from importlib import resources

import msgspec
import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.estimate import Roofline, bytes_read, ranks_reached
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.mesh import Mesh


def _spec(name: str) -> ModelSpec:
    text = resources.files("firstlight.data").joinpath("models", f"{name}.json").read_text()
    return FAMILIES.describe(json.loads(text))[0]


def test_a_token_reads_its_own_experts_and_a_crowd_reads_all() -> None:
    spec = _spec("deepseek-v3")
    weights = {"expert": 2560, "attention": 100, "embedding": 50, "vision": 7}
    assert bytes_read(spec, weights, 3, tokens=1) == 2560 * 8 // 256 + 100 + 3
    assert bytes_read(spec, weights, 3, tokens=100_000) == 2560 + 100 + 3


def test_a_tied_embedding_is_read_as_the_head() -> None:
    spec = _spec("llama-3.1-405b")
    assert bytes_read(spec, {"attention": 100, "embedding": 50}, 0, tokens=1) == 100
    tied = type(spec)(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "tied_head": True})
    assert bytes_read(tied, {"attention": 100, "embedding": 50}, 0, tokens=1) == 150
    assert bytes_read(tied, {"attention": 100, "embedding": 50, "head": 50}, 0, tokens=1) == 150


def test_traffic_is_a_ring_of_two_sums_a_layer() -> None:
    roofline = Roofline(_spec("llama-3.1-405b"), parse_cluster("8xH200"))
    blocks, embedding, gather = roofline.traffic(Mesh(tp=8))
    assert blocks.calls_per_step == 2 * 126
    assert blocks.bytes_per_token == 2 * 126 * 16384 * 2 * 2 * 7 // 8
    assert embedding.bytes_per_token == 16384 * 2 * 2 * 7 // 8
    assert gather.bytes_per_token == 128256 * 2 * 7 // 8
    assert roofline.traffic(Mesh(tp=8), "prefill", 1000)[2].bytes_per_token == round(gather.bytes_per_token / 1000)
    assert roofline.traffic(Mesh()) == ()


def test_whole_attention_sums_nothing_and_computes_all_heads_on_every_rank() -> None:
    spec = _spec("llama-3.1-405b")
    roofline = Roofline(spec, parse_cluster("8xH200"))
    divided, whole = Mesh(tp=8), Mesh(tp=8, attention="whole")
    (before, *ends), (after, *same) = roofline.traffic(divided), roofline.traffic(whole)
    assert (before.calls_per_step, after.calls_per_step) == (2 * 126, 126)
    assert after.bytes_per_token * 2 == before.bytes_per_token
    assert ends == same
    mixers = 126 * (2 * 16384 * 16384 + 2 * 16384 * 1024)
    fast, slow = (roofline.step(mesh, "prefill", 4096, 0).compute_ms or 0.0 for mesh in (divided, whole))
    assert slow - fast == pytest.approx(2 * mixers * 7 / 8 * 4096 / 989e12 * 1000)
    keys = [
        row
        for row in Roofline(spec, parse_cluster("8xH200")).traffic(
            msgspec.structs.replace(whole, tp=2, sp=4), "prefill", 4096
        )
        if row.what == "keys and values"
    ]
    assert keys[0].bytes_per_token == 126 * 2 * 8 * 128 * 2 * 3 // 4


def test_decode_is_bound_by_memory_and_prefill_by_compute() -> None:
    roofline = Roofline(_spec("llama-3.1-405b"), parse_cluster("8xH200"))
    decode = roofline.step(Mesh(tp=8), "decode", 1, 101_000_000_000)
    assert decode.memory_ms == pytest.approx(101e9 / (4.8e12 * 0.8) * 1000)
    assert decode.compute_ms is not None
    assert decode.memory_ms > decode.compute_ms
    assert decode.bound_by == "memory"
    prefill = roofline.step(Mesh(tp=8), "prefill", 4096, 101_000_000_000)
    assert prefill.compute_ms == pytest.approx(2 * 403_752_042_496 * 4096 / (989e12 * 8) * 1000)
    assert prefill.memory_ms is not None
    assert prefill.compute_ms > prefill.memory_ms
    assert prefill.bound_by == "compute"


def test_tokens_that_travel_to_experts_are_counted_by_the_ranks_they_reach() -> None:
    assert ranks_reached(8, 8, 1) == pytest.approx(7 / 8)  # one of eight, and one in eight is here
    assert ranks_reached(2, 8, 8) == 1.0
    assert ranks_reached(4, 8, 2) == pytest.approx(3 * (1 - 6 / 8 * 5 / 7))
    spec, mesh = _spec("deepseek-v3"), Mesh(ep=8)
    roofline = Roofline(spec, parse_cluster("8xH200"))
    exchanged, keys, stream = roofline.traffic(mesh, "prefill", 4096)
    per_layer = ranks_reached(8, 256, 8) * (2 * 7168 * 2 + 8 * 8) / 8
    assert exchanged.bytes_per_token == round(58 * per_layer)
    assert keys.bytes_per_token == 61 * 576 * 2 * 7 // 8
    assert stream.bytes_per_token == 7168 * 2 * 7 // 8
    (reduced,) = roofline.traffic(mesh, "decode", 1)
    assert reduced.operation == "all_reduce"
    assert reduced.bytes_per_token == 58 * 7168 * 2 * 2 * 7 // 8
    assert Roofline(spec, parse_cluster("8xH200"), "reduce").traffic(mesh, "prefill", 4096) == (reduced,)


def test_sequence_parallel_divides_the_compute_of_prefill_alone() -> None:
    roofline = Roofline(_spec("llama-3.1-405b"), parse_cluster("8xH200"))
    one, four = (roofline.step(Mesh(sp=sp), "prefill", 4096, 0).compute_ms or 0.0 for sp in (1, 4))
    assert four == pytest.approx(one / 4)
    one, four = (roofline.step(Mesh(sp=sp), "decode", 8, 0).compute_ms or 0.0 for sp in (1, 4))
    assert four == one
    assert roofline.traffic(Mesh(sp=4), "decode", 8) == ()


def test_an_axis_that_leaves_the_node_waits_for_the_network() -> None:
    spec = _spec("llama-3.1-405b")
    near = Roofline(spec, parse_cluster("16xH200")).step(Mesh(tp=16), "decode", 1, 0).communication_ms or 0.0
    far = Roofline(spec, parse_cluster("2x8xH200")).step(Mesh(tp=16), "decode", 1, 0).communication_ms or 0.0
    assert far > 2.9 * near
    outer = Roofline(spec, parse_cluster("2x8xH200"))
    same = outer.step(Mesh(tp=8, pp=2), "decode", 1, 0).communication_ms or 0.0
    assert same < 1.1 * near, "only the hand-over between stages leaves the node"
