"""`scan --deep`: odd scales among siblings, manifests written and held against, strictness."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.engine.weights.files.safetensors_file import Tensor, read, write
from firstlight.workbench import deep
from firstlight.workbench.cli import main
from firstlight.workbench.deep import Gauge, Measure, TensorReading, read_all
from firstlight.workbench.outliers import outliers
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Report
from firstlight.workbench.scan import scan
from tests.engine.weights import far

Get = Callable[[str], Path]
NORM = "model.norm.weight"


@pytest.fixture
def home(checkpoint: Get, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama-tied"), tmp_path / "model"))


def changed(home: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = read(home / "model.safetensors")
    change(tensors)
    write(home / "model.safetensors", tensors, {"format": "pt"})
    return home


def of(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


# Scales


def readings(*scales: float) -> list[TensorReading]:
    return [TensorReading(f"layers.{i}.mlp.up.weight", "", 0, 0, rms, rms) for i, rms in enumerate(scales)]


def test_scales_that_differ_as_layers_do_are_no_outliers() -> None:
    assert list(outliers(readings(0.02, 0.03, 0.05, 0.01, 0.08, 0.2, 0.02))) == []
    assert list(outliers(readings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))) == [], "all alike: biases that were never trained"
    assert list(outliers(readings(1, 100))) == [], "too few to tell which one is odd"


@pytest.mark.parametrize(("scales", "odd"), [((1.0, 1000.0), [0, 1]), ((0.02, 0.021, 60.0), [2])])
def test_few_siblings_are_odd_only_when_very_far_apart(scales: tuple[float, ...], odd: list[int]) -> None:
    (finding,) = outliers(readings(*scales))
    assert finding.tensors == tuple(f"layers.{i}.mlp.up.weight" for i in odd)
    assert "times apart in scale" in finding.message


def test_a_scale_of_zero_is_a_hole_as_well() -> None:
    pair = [TensorReading(f"layers.{i}.mlp.up.weight_scale_inv", "", 0, 0, i / 100, i / 100) for i in range(2)]
    (finding,) = outliers(pair)
    assert finding.tensors == ("layers.0.mlp.up.weight_scale_inv",)


@pytest.mark.parametrize(
    ("odd", "words"),
    [(0.0, "all zero"), (2.0, "up to 100 times"), (0.0002, "up to 1/100 of"), (1e30, "times the scale")],
)
def test_one_that_is_unlike_its_siblings_is_named(odd: float, words: str) -> None:
    (finding,) = outliers(readings(0.02, 0.02, 0.021, odd, 0.019, 0.02, 0.02))
    assert (finding.code, finding.severity, finding.tensors) == ("odd-scale", "warning", ("layers.3.mlp.up.weight",))
    assert words in finding.message
    assert finding.next


def test_the_scale_of_a_tensor_is_measured_over_all_its_chunks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "CHUNK_BYTES", 64)
    tensors = read(home / "model.safetensors")
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.workbench.progress import Progress

    found, _ = deep.read_all(Checkpoint.open(home), Progress(), threads=3)
    assert [reading.tensor for reading in found] == sorted(tensors)
    for reading in found:
        values = np.asarray(tensors[reading.tensor], np.float64)
        assert reading.rms == pytest.approx(np.sqrt(np.mean(values**2)), rel=1e-12)
        assert reading.largest == np.abs(values).max()


def test_an_exponent_stored_as_a_byte_can_be_no_number(tmp_path: Path) -> None:
    """All ones in a power of two are NaN (OCP MX v1.0, section 5.4); in codes stored as bytes they are numbers."""
    scales, codes = np.full((4, 2), 127, np.uint8), np.full((4, 2), 255, np.uint8)
    scales[1, 1] = 255
    write(tmp_path / "model.safetensors", {"a.weight_scale": scales, "a.weight_packed": codes})
    (tmp_path / "config.json").write_text("{}")
    readings, _ = read_all(Checkpoint.open(tmp_path), Progress())
    assert {reading.tensor: reading.nan for reading in readings} == {"a.weight_packed": 0, "a.weight_scale": 1}


FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.float32,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}


def measured(dtype: str, raw: np.ndarray, name: str = "a.weight_scale") -> Measure:
    gauge, found = Gauge(), Measure()
    add = gauge.measure_of(TensorInfo(name, dtype, (raw.nbytes * 8 // DTYPE_BITS[dtype],), "", 0, raw.nbytes))
    if add is not None:
        add(found, memoryview(raw.view(np.uint8)))
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_and_the_scale_of_the_rest_as_torch_has_them(dtype: str) -> None:
    """Every byte there is; then one block without what is not finite, small numbers below the normal ones among it."""
    raw = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    wide = torch.from_numpy(raw).view(FLOATS[dtype]).to(torch.float64)
    found = measured(dtype, raw)
    assert (found.nan, found.infinite) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert found.nan, "the case holds none to be found"
    assert found.scale() == (None, None)
    if "FNUZ" in dtype:
        return  # no release has scales in these
    usual = (wide.abs() < 1e30) & ((wide.abs() > 1e-30) | (wide == 0))
    kept = torch.from_numpy(raw).view(FLOATS[dtype])[usual]
    expected = kept.to(torch.float64)
    rms, largest = measured(dtype, kept.view(torch.uint8).numpy()).scale()
    assert rms == pytest.approx(expected.square().mean().sqrt().item(), rel=1e-12)
    assert largest == expected.abs().max().item()


def test_of_codes_a_hole_is_seen_and_no_scale() -> None:
    """Scales say how large a quantized weight is; whole numbers that are no codes may well be zero."""
    zeros, codes = np.zeros(1 << 18, np.uint8), np.zeros(1 << 18, np.uint8)
    codes[-1] = 3
    for dtype, name in (("F8_E4M3", "a.weight"), ("I8", "a.weight"), ("I32", "a.qweight"), ("U8", "a.up_proj_blocks")):
        assert measured(dtype, zeros, name).scale() == (0, 0)
        assert measured(dtype, codes, name).scale() == (None, None)
    assert measured("I32", zeros, "a.g_idx").scale() == (None, None)
    hole = [TensorReading(f"layers.{i}.up.qweight", "", 0, 0, *((0.0, 0.0) if i == 3 else ())) for i in range(6)]
    (finding,) = outliers(hole)
    assert finding.tensors == ("layers.3.up.qweight",)


def test_a_thread_takes_many_small_tensors_or_few_large_ones() -> None:
    sizes = [1] * 100 + [deep.BATCH_BYTES] * 3 + [5]
    tensors = [TensorInfo(str(i), "U8", (size,), "", 0, size) for i, size in enumerate(sizes)]
    batches = list(deep._batches(tensors))
    assert [tensor for batch in batches for tensor in batch] == tensors
    assert [len(batch) for batch in batches] == [64, 37, 1, 1, 1]


# Manifests


def test_another_cut_of_the_same_weights_is_equal(home: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    assert main(["scan", str(home), "-q", "--manifest", str(manifest)]) == 0
    written = json.loads(manifest.read_text())
    assert written["format"] == "firstlight-manifest-1"
    assert "config.json" in written["files"]
    tensors = read(home / "model.safetensors")
    (home / "model.safetensors").unlink()
    names = list(tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        write(home / f"model-0000{number}-of-00002.safetensors", {name: tensors[name] for name in part})
    report = scan(home, against=manifest)
    assert report.status == "passed"
    assert not of(report, "manifest-mismatch")
    (check,) = [check for check in report.checks if "manifest" in check.name]
    assert check.detail == f"{len(tensors)} of model compared by dtype, shape and SHA-256"


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "one bit": (lambda t: np.asarray(t[NORM]).view(np.uint32).__setitem__(3, 0x3F800001), "has other contents"),
    "a dtype": (lambda t: t.update({NORM: np.asarray(t[NORM]).astype(np.float64)}), "has another dtype or shape"),
    "a tensor less": (lambda t: t.pop(NORM), "is in the manifest and not here"),
    "a tensor more": (lambda t: t.update({"x": np.ones(2)}), "is here and not in the manifest"),
    "a name": (lambda t: t.update({"x": t.pop(NORM)}), "is called otherwise than in the manifest: x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_otherwise_is_named(change: str, home: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    scan(home, manifest=manifest)
    act, words = CHANGES[change]
    report = scan(changed(home, act), against=manifest)
    assert report.status == "failed"
    (finding,) = of(report, "manifest-mismatch")
    assert finding.severity == "fatal"
    assert words in finding.message
    assert finding.expected != finding.found
    assert finding.tensors == (("x",) if change in ("a tensor more", "a name") else (NORM,))


def test_tensors_that_changed_places_are_told_by_what_they_hold(home: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    scan(home, manifest=manifest)
    one, other = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    report = scan(changed(home, lambda t: t.update({one: t[other], other: t[one]})), against=manifest)
    (finding,) = of(report, "manifest-mismatch")
    assert finding.tensors == (one, other)
    assert str(finding.found).endswith(f", the contents of {other} there")


def test_a_side_file_that_is_otherwise_is_a_warning(home: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    scan(home, manifest=manifest)
    (home / "README.md").write_text("words")
    (home / "generation_config.json").write_text("{}")
    report = scan(home, against=manifest)
    assert report.status == "passed"
    assert {finding.file for finding in of(report, "manifest-mismatch")} == {"generation_config.json"}


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"format":"other","name":"","tensors":{},"files":{}}'])
def test_a_manifest_that_is_none_is_refused_at_once(
    text: str | None, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest.json"
    if text is not None:
        manifest.write_text(text)
    assert main(["scan", str(home), "--against", str(manifest)]) == 2
    error = capsys.readouterr().err
    assert "the manifest" in error
    assert "write one with scan --manifest" in " ".join(error.split())


@pytest.mark.parametrize(
    ("entry", "file", "words"),
    [
        ({"sha256": ""}, "config.json", "regex"),
        ({"sha256": "0" * 63 + "G"}, "config.json", "regex"),
        ({"shape": [-5]}, "config.json", ">= 0"),
        ({}, "../../etc/passwd", "regex"),
    ],
)
def test_a_manifest_that_is_damaged_is_refused_before_weights_are_blamed(
    entry: dict[str, Any], file: str, words: str, home: Path, tmp_path: Path
) -> None:
    tensors = {"a": {"dtype": "F32", "shape": [1], "sha256": "0" * 64, **entry}}
    raw = {"format": "firstlight-manifest-1", "name": "m", "tensors": tensors, "files": {file: "0" * 64}}
    (tmp_path / "m.json").write_text(json.dumps(raw))
    with pytest.raises(Refused, match="cannot be used") as refused:
        scan(home, against=tmp_path / "m.json")
    assert words in str(refused.value)


def test_a_manifest_that_cannot_be_written_is_said(home: Path, tmp_path: Path) -> None:
    assert main(["scan", str(home), "-q", "--manifest", str(tmp_path / "absent" / "manifest.json")]) == 2


def test_a_copy_over_the_network_is_held_against_a_manifest(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = tmp_path / "manifest.json"
    scan(home, manifest=manifest)
    with far.served(home) as web:
        report = scan(web.url, against=manifest)
    assert report.status == "passed", report.findings
    assert not of(report, "manifest-mismatch")


# Strictness


def test_strict_fails_on_a_warning(home: Path) -> None:
    assert main(["scan", str(home), "-q"]) == 0
    assert main(["scan", str(home), "-q", "--strict"]) == 1
    report = scan(home, strict=True)
    (check,) = [check for check in report.checks if check.status == "failed"]
    assert check.name == "no warnings (strict)"
    assert check.value == sum(finding.severity == "warning" for finding in report.findings) > 0
    sample = Path(__file__).parents[2] / "data" / "samples" / "menagerie"
    assert scan(sample, strict=True).status == "passed"


def test_values_that_are_no_numbers_are_a_finding_with_file_and_tensors(home: Path) -> None:
    def plant(tensors: dict[str, Tensor]) -> None:
        for name, value in ((NORM, np.nan), ("model.layers.0.mlp.up_proj.weight", np.inf)):
            own = tensors[name]
            assert isinstance(own, np.ndarray)
            tensors[name] = own.copy()
            tensors[name].flat[3] = value  # type: ignore[union-attr]

    report = scan(changed(home, plant), deep=True)
    assert report.status == "failed"
    (finding,) = of(report, "not-finite")
    assert (finding.severity, finding.file, finding.found) == ("fatal", "model.safetensors", "1 NaN, 1 infinite")
    assert set(finding.tensors) == {NORM, "model.layers.0.mlp.up_proj.weight"}


def test_a_weight_without_siblings_that_is_all_zero_is_a_hole(home: Path) -> None:
    name = "model.embed_tokens.weight"

    def empty(tensors: dict[str, Tensor]) -> None:
        own = tensors[name]
        assert isinstance(own, np.ndarray)
        tensors[name] = np.zeros_like(own)

    (finding,) = of(scan(changed(home, empty), deep=True), "odd-scale")
    assert (finding.file, finding.tensors) == ("model.safetensors", (name,))
    assert of(scan(home), "odd-scale") == [], "only values show it"


# Layers that hold the bytes of others


def layer(number: int) -> str:
    return f"model.layers.{number}."


def as_layer(tensors: dict[str, Tensor], one: int, other: int, words: str = "") -> None:
    """What a layer has becomes another's as well, as far as names have these words in them."""
    for name in [name for name in tensors if name.startswith(layer(one)) and words in name]:
        tensors[name.replace(layer(one), layer(other))] = tensors[name]


def test_a_layer_that_is_written_twice_is_a_warning(home: Path) -> None:
    assert of(scan(home, deep=True), "equal-layers") == []
    report = scan(changed(home, lambda tensors: as_layer(tensors, 0, 1)), deep=True)
    (finding,) = of(report, "equal-layers")
    assert (finding.severity, finding.file, report.status) == ("warning", "model.safetensors", "passed")
    assert finding.message == "model.layers.1 holds the bytes of model.layers.0: 7 of its 7 weights"
    assert all(name.startswith(layer(1)) and "norm" not in name for name in finding.tensors)
    assert of(scan(home), "equal-layers") == [], "only values show it"


def test_a_part_of_a_layer_that_is_written_twice_is_counted(home: Path) -> None:
    (finding,) = of(scan(changed(home, lambda t: as_layer(t, 1, 0, ".mlp.")), deep=True), "equal-layers")
    assert finding.message == "model.layers.1 holds the bytes of model.layers.0: 3 of its 7 weights"


@pytest.mark.parametrize(("words", "value"), [("", 0.0), ("", 1.0), ("norm", 0.7), ("", -0.02)])
def test_what_is_equal_by_right_is_no_copy(home: Path, words: str, value: float) -> None:
    """Norms, whatever they are, and matrices of one value."""

    def fill(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if words in name and ".layers." in name:
                tensors[name] = np.full(tensor.shape, value, np.float32)

    assert of(scan(changed(home, fill), deep=True), "equal-layers") == []
