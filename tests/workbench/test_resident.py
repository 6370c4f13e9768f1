"""What quantized weights take once they are loaded: the bytes that ranks really hold, and a plan that says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.hardware import Cluster, Device
from firstlight.engine.parallel.kept import usually
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.parallel.plan import make_plan
from firstlight.engine.weights.formats.registry import stored_format
from firstlight.engine.weights.loader import TORCH_DTYPES
from firstlight.kernels.packed.kinds import expected_faster
from firstlight.kernels.registry import choose
from firstlight.workbench import load as loading
from firstlight.workbench.plan import plan
from firstlight.workbench.resident import resident_finding
from tests.engine.weights.quantized import CONFIGS
from tests.engine.weights.test_formats_load import MODELS, written

MENAGERIE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"


def cluster(count: int, memory_bytes: int) -> Cluster:
    device = Device(name="X", memory_bytes=memory_bytes, per_node=count)
    return Cluster(nodes=1, per_node=count, device=device)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(ep=2), Mesh(tp=2), Mesh(tp=2, ep=2)], ids=Mesh.describe)
@pytest.mark.parametrize("name", ["mxfp4", "fp8-blocks", "packed-int4", "nvfp4", "gptq", "awq"])
def test_bytes_are_those_that_ranks_hold(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """Experts of 32 channels are one group of 32, and halves of one on two ranks, each of which has the scale."""
    ledger, _ = written("qwen3_moe", CONFIGS[name], tmp_path)
    config = {**MODELS["qwen3_moe"], "quantization_config": CONFIGS[name], "dtype": "bfloat16"}
    spec, matcher = FAMILIES.describe(config)
    stored = stored_format(config, spec.dtype, matcher.rules)
    found = make_plan(spec, stored, cluster(4, 1 << 30), mesh)
    keep = usually("auto", "cuda")
    ranks = [
        rank_pieces(spec, mesh, r, spec.dtype, ledger, keep_packed=keep.roles).nbytes for r in range(mesh.world_size)
    ]
    loaded, finding = resident_finding(spec, stored, found, "BF16", full_window=False)
    assert loaded == max(ranks)
    assert "experts, attention, dense layers stay packed" in finding.message
    assert "unpacked of" not in finding.message
    if name == "packed-int4":
        assert loaded < found.weight_bytes_per_device, "true shapes are read and left"


def test_a_plan_that_fits_as_stored_and_not_as_loaded(tmp_path: Path) -> None:
    """No operator divides codes by scales."""
    inverse = {**CONFIGS["fp8-blocks"], "weight_scale_semantics": "inverse"}
    written("llama", inverse, tmp_path)
    config: dict[str, Any] = {**MODELS["llama"], "quantization_config": inverse}
    spec, matcher = FAMILIES.describe(config)
    stored = stored_format(config, spec.dtype, matcher.rules)
    packed = make_plan(spec, stored, cluster(1, 1 << 30), Mesh(), context=spec.max_positions)
    memory_bytes = int(packed.largest.total / 0.85) + 4096
    report = plan(tmp_path, cluster(1, memory_bytes), Mesh())
    assert report.status == "passed"
    (finding,) = [finding for finding in report.findings if finding.code == "unpacked-weights"]
    assert finding.severity == "warning"
    assert "does not fit" in finding.message
    assert "unpacked of attention, dense layers: FP8, a scale per 16 x 16, divided by: codes are" in finding.message
    assert report.metrics["loaded_weight_bytes_per_device"].value > report.metrics["weight_bytes_per_device"].value


def test_kimi_k3_is_held_as_it_is_stored() -> None:
    report = plan("kimi-k3", cluster(64, 141 << 30), Mesh(tp=8, ep=8))
    assert not [finding for finding in report.findings if finding.code == "unpacked-weights"]
    loaded, stored = (report.metrics[f"{kind}weight_bytes_per_device"].value for kind in ("loaded_", ""))
    assert loaded == stored


@pytest.mark.parametrize("name", ["plain", "awq", "fp8-blocks"])
def test_memory_of_a_release_is_asked_for_before_torch_is_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system backs it while torch is being imported; which quantized weights stay packed is known without it."""
    if name != "plain":
        written("llama", CONFIGS[name], tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # who imports it now fails

    class Reached(Exception):
        """As far as memory is reserved."""

    def reserve(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(loading, "_load_and_add", reserve)
    with pytest.raises(Reached):
        loading.load(MENAGERIE if name == "plain" else tmp_path)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_what_is_expected_to_be_faster_is_what_an_engine_finds(dtype: str) -> None:
    assert expected_faster(dtype) == choose("cpu", TORCH_DTYPES[dtype]).packs_faster()
