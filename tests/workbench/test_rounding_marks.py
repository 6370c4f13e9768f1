"""Golden files of references that rounded: it is said, and a fault still fails."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.workbench.golden import Golden
from firstlight.workbench.mends import DECAYS
from firstlight.workbench.reference import Reference
from firstlight.workbench.report import Report
from firstlight.workbench.rounding_marks import narrow_dtype
from firstlight.workbench.verify import verify
from tests.checkpoints import TINY
from tests.sweep import outside


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """A checkpoint stored in bfloat16, and a golden file of the reference that computes in the dtype asked for."""
    root = tmp_path_factory.mktemp("rounded")

    def make(name: str, dtype: str) -> tuple[Path, Path]:
        home = root / f"{name}-{dtype}"
        model = outside.model_of(TINY[name].config)
        given = outside.prompts(int(model.config.get_text_config().vocab_size), 32)
        outside.write(model, home, given, {}, torch.bfloat16)
        model = outside.reopened(model, home)
        return home, outside.write_golden(home, given, outside.run(model.to(getattr(torch, dtype)), given, 2))

    return make


def verified(home: Path, golden: Path) -> tuple[Report, dict[str, list[str]]]:
    report = verify(EngineOptions(checkpoint=str(home), threads=1), golden)
    codes: dict[str, list[str]] = {}
    for finding in report.findings:
        codes.setdefault(finding.code, []).append(finding.message)
    return report, codes


def spoilt(home: Path, name: str, factor: float) -> None:
    """One weight is another than the reference had."""
    path = home / "model.safetensors"
    tensors = {key: np.asarray(getattr(value, "bits", value)) for key, value in read(path).items()}
    assert tensors[name].dtype == np.uint16, "stored in bfloat16"
    loaded = {key: torch.from_numpy(value.copy()).view(torch.bfloat16) for key, value in tensors.items()}
    loaded[name] *= factor
    from safetensors.torch import save_file

    save_file(loaded, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_reference_in_bfloat16_is_named_and_the_limit_stays(
    made: Callable[[str, str], tuple[Path, Path]], name: str
) -> None:
    home, golden = made(name, "bfloat16")
    report, codes = verified(home, golden)
    assert report.status == "failed", "float32 is not held to rounded numbers by another limit than was asked for"
    assert any("computed in BF16" in message for message in codes["bad-golden"])
    assert report.metrics["relative_max_abs_limit"].value == 1e-3


def test_a_reference_in_float32_is_not_taken_for_another(made: Callable[[str, str], tuple[Path, Path]]) -> None:
    home, golden = made("llama", "float32")
    report, codes = verified(home, golden)
    assert report.status == "passed"
    assert "bad-golden" not in codes
    assert narrow_dtype(Golden.read(golden)) is None


def test_half_precision_is_told_from_bfloat16(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float16).astype(np.float32)
    write(tmp_path / "g.safetensors", {"input_ids": np.ones((1, 4), np.int64), "logits": values})
    assert narrow_dtype(Golden.read(tmp_path / "g.safetensors")) == "F16"


def test_decay_tables_that_a_checkpoint_rounds(made: Callable[[str, str], tuple[Path, Path]]) -> None:
    """The reference uses MiniMax's tables as they are stored; here they follow from the configuration: it is said."""
    home, golden = made("minimax", "float32")
    report, codes = verified(home, golden)
    assert report.status == "passed"
    assert any("decay tables are rounded to BF16" in message for message in codes["bad-golden"])
    assert any("computed from the configuration" in message for message in codes["dtype-mismatch"])
    assert verify(EngineOptions(checkpoint=str(home), threads=1), reference="transformers").status == "passed"
    spoilt(home, "model.layers.0.self_attn.output_gate.weight", 1.5)
    assert verified(home, golden)[0].status == "failed"


def test_the_reference_is_given_exact_tables(made: Callable[[str, str], tuple[Path, Path]]) -> None:
    home, _ = made("minimax", "float32")
    model = Reference.open(home).model
    (first, *_) = (module for module in model.modules() if hasattr(module, "decay_factors"))
    rate = first.get_slope_rate()
    for name, exact in zip(DECAYS, (rate, *first.decay_factors(rate)), strict=True):
        torch.testing.assert_close(getattr(first, name), exact, rtol=0, atol=0)
