"""The roofline: what a step reads, and what it sends."""

import json
from importlib import resources

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.estimate import bytes_read, step_time, traffic
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


def test_traffic_is_a_ring_of_two_sums_a_layer() -> None:
    spec = _spec("llama-3.1-405b")
    reduce, gather = traffic(spec, Mesh(tp=8))
    assert reduce.calls_per_step == 2 * 126
    assert reduce.bytes_per_token == 2 * 126 * 16384 * 2 * 2 * 7 // 8
    assert gather.bytes_per_token == 128256 * 2 * 7 // 8
    assert traffic(spec, Mesh()) == ()


def test_decode_is_bound_by_memory_and_prefill_by_compute() -> None:
    spec, cluster = _spec("llama-3.1-405b"), parse_cluster("8xH200")
    decode = step_time(spec, Mesh(tp=8), cluster, "decode", 1, 403_752_042_496, 101_000_000_000)
    assert decode.memory_ms == pytest.approx(101e9 / (4.8e12 * 0.8) * 1000)
    assert decode.compute_ms is not None
    assert decode.memory_ms > decode.compute_ms
    prefill = step_time(spec, Mesh(tp=8), cluster, "prefill", 4096, 403_752_042_496, 101_000_000_000)
    assert prefill.compute_ms == pytest.approx(2 * 403_752_042_496 * 4096 / (989e12 * 8) * 1000)
    assert prefill.memory_ms is not None
    assert prefill.compute_ms > prefill.memory_ms
