"""Golden files are read as documented, and what contradicts itself or the model is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.files.safetensors_file import bfloat16, read, write
from firstlight.workbench.golden import Golden
from tests.checkpoints import TINY

SPEC, _ = FAMILIES.describe(TINY["llama"].config)


def arrays(**changes: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    found: dict[str, Any] = {
        "input_ids": np.arange(6, dtype=np.int64).reshape(2, 3),
        "logits": draw.standard_normal((2, 3, 131)).astype(np.float32),
        "hidden.0": draw.standard_normal((2, 3, 32)).astype(np.float32),
        "hidden.3": draw.standard_normal((2, 3, 32)).astype(np.float32),
        "generated": np.array([[1, 2], [3, 4]], dtype=np.int64),
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    given = arrays(attention_mask=np.array([[1, 1, 1], [0, 1, 1]]), pixel_values=np.zeros((1, 3, 4, 4), np.float32))
    Golden.of(given, "here").write(tmp_path / "golden.safetensors")
    found = Golden.read(tmp_path / "golden.safetensors")
    assert set(found.hidden) == {0, 3}
    assert found.longest == 3
    assert found.mask.tolist() == [[True, True, True], [False, True, True]]
    for name, value in {**found.outputs, **found.pictures}.items():
        np.testing.assert_array_equal(value, given[name])
    assert set(read(tmp_path / "golden.safetensors")) == set(given)


def test_unknown_names_are_ignored_and_said() -> None:
    found = Golden.of(arrays(attentions=np.zeros(3), position_ids=np.zeros(3)), "file")
    assert found.ignored == ("attentions", "position_ids")
    (finding,) = found.check(SPEC)
    assert finding.severity == "note"
    assert "attentions, position_ids" in finding.message


def test_narrower_dtypes_are_widened(tmp_path: Path) -> None:
    given = arrays()
    rounded = bfloat16(given["logits"])
    write(tmp_path / "g.safetensors", {**given, "logits": rounded, "input_ids": given["input_ids"].astype(np.int32)})
    found = Golden.read(tmp_path / "g.safetensors")
    assert found.input_ids.dtype == np.int64
    np.testing.assert_array_equal(found.outputs["logits"], rounded.float32())


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": np.zeros((2, 3), np.float32)}, "input_ids"),
        ({"input_ids": np.zeros(3, np.int64)}, "input_ids"),
        ({"logits": np.zeros((2, 4, 131), np.float32)}, "logits"),
        ({"logits": np.zeros((2, 3, 130), np.float32)}, "logits"),
        ({"logits": np.zeros((2, 3, 131), np.int64)}, "logits"),
        ({"hidden.4": np.zeros((2, 3, 32), np.float32)}, "hidden.4"),
        ({"hidden.1": np.zeros((2, 3, 31), np.float32)}, "hidden.1"),
        ({"hidden.1": np.full((2, 3, 32), np.nan, np.float32)}, "hidden.1"),
        ({"attention_mask": np.ones((2, 4), np.int64)}, "attention_mask"),
        ({"attention_mask": np.array([[1, 1, 1], [1, 0, 1]])}, "attention_mask"),
        ({"attention_mask": np.array([[1, 1, 1], [0, 0, 0]])}, "attention_mask"),
        ({"attention_mask": np.array([[1, 1, 1], [0, 2, 2]])}, "attention_mask"),  # numbers of packed sequences
        ({"attention_mask": np.array([[1, 1, np.nan], [1, 1, 1]])}, "attention_mask"),
        ({"generated": np.zeros((3, 2), np.int64)}, "generated"),
        ({"pixel_values": np.zeros((1, 3, 12, 12), np.float32)}, "pixel_values"),
        ({"pixel_values_videos": np.zeros((4, 24), np.float32)}, "pixel_values_videos"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], tensor: str) -> None:
    with pytest.raises(Refused) as refused:
        Golden.of(arrays(**changes), "the/file").check(SPEC)
    (finding,) = refused.value.findings
    assert finding.code == "bad-golden"
    assert finding.file == "the/file"
    assert finding.tensors == (tensor,)
    assert finding.expected
    assert finding.found
    assert finding.next


def test_nothing_to_compare_with_is_refused() -> None:
    with pytest.raises(Refused, match="nothing to compare with"):
        Golden.of({"input_ids": np.zeros((1, 2), np.int64)}, "file")


def test_numbers_at_padding_do_not_matter() -> None:
    logits = arrays()["logits"]
    logits[1, 0] = np.nan
    Golden.of(arrays(logits=logits, attention_mask=np.array([[1, 1, 1], [0, 1, 1]])), "file").check(SPEC)


def test_layers_come_in_their_order() -> None:
    given = arrays(**{f"hidden.{i}": np.zeros((2, 3, 32), np.float32) for i in range(12)})
    assert list(Golden.of(given, "file").hidden) == list(range(12))
