"""A new storage format is a file of its own and the lines that CONTRIBUTING.md names, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights import packed, packing, published, recipes
from firstlight.engine.weights.accounts.wire import ledger_of, plain
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats import announced
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Axis, Box, Format, Part
from firstlight.engine.weights.formats.scheme import Group, Scheme
from firstlight.engine.weights.formats.unpacking import scaled
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.synthesize import synthesize
from firstlight.engine.weights.unpacked import Unpacked
from firstlight.workbench.scan import scan
from tests.engine.weights.test_formats_load import MODELS, loaded_is

CONFIG: dict[str, Any] = {**MODELS["llama"], "quantization_config": {"quant_method": "steps", "step_columns": 24}}


class Steps(Format, frozen=True, kw_only=True):
    """The toy: whole numbers in `weight`, for each `step` columns of a row a power of two in `weight_step`."""

    step: int

    label: ClassVar[str] = "STEPS"

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            Part("codes", "weight", ("I8",), (Axis(ROWS), Axis(COLUMNS))),
            Part("power", "weight_step", ("I8",), (Axis(ROWS), Axis(COLUMNS, self.step))),
        )

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        return scaled(stored["codes"].float(), torch.exp2(stored["power"].float()), box, (1, self.step))


def read(options: Any, config: Mapping[str, Any]) -> Scheme:
    """The line in `announced.py`."""
    return Scheme("steps", (Group(Steps(step=options.get("step_columns"))),))


def pack(weight: packing.Floats, how: Steps, _: np.random.Generator) -> tuple[packing.Parts, packing.Floats]:
    """The packer in `packing.py`."""
    power = np.ceil(np.log2(packing.absolute_scales(weight, (1, how.step), 127.0)))
    each = np.exp2(packing.spread(power, (1, how.step), weight.shape))
    codes = np.round(weight / each)
    return {"codes": codes, "power": power}, (codes * each).astype(np.float32)


def tell(found: recipes.Found) -> recipes.Recipe | None:
    """How references tell it, in `recipes.py`."""
    if found.endings["scale"] != "weight_step":
        return None
    (step,) = found.said.everywhere("step_columns")
    return recipes.Recipe("steps", found.codes.shape, found.tensors, (1, step))


def formula(how: recipes.Recipe, stored: Mapping[str, Tensor]) -> packing.Floats:
    """The formula in `published.py`."""
    power = np.repeat(stored["scale"].numpy(), how.block[1], axis=1)[:, : how.shape[1]]
    return np.ldexp(stored["codes"].numpy().astype(np.float32), power)


def test_a_format_of_its_own_file_and_the_lines_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, scanned, accounted for, sent, read by every rank in steps that shares cut, and read by references."""
    monkeypatch.setattr(announced, "READERS", {**announced.READERS, "steps": read})
    monkeypatch.setattr(packed, "COMPANIONS", (*packed.COMPANIONS, "_step"))  # how names of its steps end
    monkeypatch.setattr(packing, "PACKERS", {**packing.PACKERS, Steps: pack})
    monkeypatch.setattr(recipes, "ROLES", {**recipes.ROLES, "weight_step": "scale"})
    monkeypatch.setattr(recipes, "TELLERS", (tell, *recipes.TELLERS))
    monkeypatch.setattr(published, "FORMULAS", {**published.FORMULAS, "steps": formula})
    values = synthesize(CONFIG, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    ledger = account(checkpoint, *FAMILIES.describe(checkpoint.config))
    assert ledger.findings == ()
    assert {source.packed.format for source in ledger.sources.values() if source.packed} == {Steps(step=24)}
    assert ledger_of(msgspec.json.encode(ledger, enc_hook=plain)) == ledger
    report = scan(tmp_path)
    assert "STEPS" in {row["format"] for row in report.tables["storage"]}
    loaded_is(tmp_path, ledger, values, Mesh(tp=2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(Unpacked(checkpoint).read(name), values["layers.0.ffn.up.weight"])


def test_without_its_line_the_format_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="'steps' is not read here: nothing is known about it"):
        synthesize(CONFIG, tmp_path)
