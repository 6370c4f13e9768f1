"""Kimi K3's published figures, from its configuration alone: 2.8 trillion parameters are laid out in a second."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import stages
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.plan import plan, read_config
from firstlight.workbench.report import Report
from tests.kimi_k3 import tiny_config, write_checkpoint

FACTS = "data/models/kimi-k3.json"


@pytest.fixture(scope="module")
def planned() -> Callable[[Mesh], Report]:
    return lambda mesh: plan(FACTS, parse_cluster("8xB300"), mesh)


def test_totals_are_the_published_ones(planned: Callable[[Mesh], Report]) -> None:
    report = planned(Mesh(tp=8))
    found = {name: metric.value for name, metric in report.metrics.items()}
    assert report.passed
    assert found["tensors"] == 497_220
    assert found["parameters"] == 2_779_931_837_184
    assert found["checkpoint_bytes"] == 1_560_860_324_864
    assert found["kv_bytes_per_token"] == 27_648
    assert found["state_bytes_per_sequence"] == 434_110_464
    assert found["convolution_bytes_per_sequence"] == 69 * 3 * 3 * 12288 * 2
    assert found["active_parameters"] == pytest.approx(104e9, rel=0.01)


def test_weights_of_a_device_are_the_measured_ones(planned: Callable[[Mesh], Report]) -> None:
    """Published runs on eight devices measured 190.98 GiB for text and 191.81 with the tower on each."""
    found = {name: metric.value for name, metric in planned(Mesh(tp=8)).metrics.items()}
    assert found["text_weight_bytes_per_device"] == 205_056_581_360
    assert found["text_weight_bytes_per_device"] / 2**30 == pytest.approx(190.974, abs=5e-4)
    assert found["weight_bytes_per_device"] / 2**30 == pytest.approx(191.81, abs=5e-3)


def test_weights_as_loaded_are_those_of_the_heaviest_rank() -> None:
    """With a long context the last stage is the fullest, by its cache; the first one has more weights."""
    report = plan(FACTS, parse_cluster("8xB300"), Mesh(tp=4, pp=2), context=1 << 20)
    heaviest = max(row["weight_bytes"] for row in report.tables["ranks"])
    assert report.tables["ranks"][0]["total_bytes"] < report.tables["ranks"][-1]["total_bytes"]
    assert report.value("weight_bytes_per_device") == report.value("loaded_weight_bytes_per_device") == heaviest


def test_experts_of_a_rank(planned: Callable[[Mesh], Report]) -> None:
    """At ep 8 a rank has 112 experts of each layer: 180.8 GB of packed weights with their scales."""
    (row, *_) = planned(Mesh(ep=8)).tables["ranks"]
    assert row["expert_bytes"] == 1_446_456_066_048 // 8


def test_the_toy_is_counted_as_it_is_written(tmp_path: Path) -> None:
    """The same counting, held against files: tensors, bytes, and parameters with packed elements unpacked."""
    home = write_checkpoint(tmp_path / "toy")
    report = plan(home, parse_cluster("1xB300"), Mesh())
    found = {name: metric.value for name, metric in report.metrics.items()}
    tensors = Checkpoint.open(str(home)).tensors
    assert found["tensors"] == len(tensors)
    assert found["checkpoint_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    packed = sum(2 * tensor.nbytes for name, tensor in tensors.items() if name.endswith("weight_packed"))
    plain = sum(math.prod(t.shape) for name, t in tensors.items() if not name.endswith(("_packed", "_scale")))
    assert found["parameters"] == packed + plain


def test_pipeline_stages_hand_on_the_bank() -> None:
    """What crosses a cut: the spans that are finished and the running sum, each as wide as the model."""
    spec, _ = FAMILIES.describe(read_config(FACTS)[1])
    assert [spec.stream_shape(cut) for cut in (12, 13, 24, 84)] == [(2, 7168), (3, 7168), (3, 7168), (8, 7168)]
    toy, _ = FAMILIES.describe(tiny_config())
    assert toy.stream_shape(4) == (3, 64)


def test_what_stages_send_for_a_token_is_counted(planned: Callable[[Mesh], Report]) -> None:
    """The widest cut of eight stages lies behind seven finished spans: eight planes in bfloat16."""
    rows = planned(Mesh(pp=8)).tables["communication_bytes_per_token"]
    (sent,) = {row["bytes_per_token"] for row in rows if row["axis"] == "pp"}
    spec, _ = FAMILIES.describe(read_config(FACTS)[1])
    assert sent == max(math.prod(spec.stream_shape(first)) for first, _ in stages(spec, 8)[1:]) * 2
    assert sent == 8 * 7168 * 2
