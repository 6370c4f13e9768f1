"""How references find out what stored tensors make: by headers, and by the raw configuration where these are mute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.engine.weights.recipes import Recipe, Said, recipes, said
from firstlight.engine.weights.unpacked import Unpacked
from tests.engine.weights.quantized import CONFIGS
from tests.engine.weights.test_formats_load import written


def told(
    options: Mapping[str, Any], shape_of: tuple[int, ...] = (), **tensors: tuple[str, tuple[int, ...]]
) -> Mapping[str, Recipe]:
    """The recipes of tensors of one module `a`."""
    infos = {
        f"a.{name}": TensorInfo(f"a.{name}", dtype, shape, "", 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)
        for name, (dtype, shape) in tensors.items()
    }
    return recipes(infos, Said(options), lambda info: shape_of)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"bits": 3}},
        {"text_config": {"quantization_config": {"bits": 3}}},
        {"quantization_config": {"bits": 3}, "text_config": {"quantization_config": {"bits": 8}}},
        {"compression_config": {"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}},
    ],
)
def test_what_is_said_wherever_it_stands(config: dict[str, Any]) -> None:
    assert said(config).widths == [3]


def test_a_file_beside_counts_where_the_configuration_is_mute() -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    assert said({}, beside).groups == [16]
    assert said({"quantization_config": {"group_size": 32}}, beside).groups == [32]


def test_the_size_that_fits_counts_whichever_module_it_is_said_of() -> None:
    options = {"bits": 4, "group_size": 32, "dynamic": {"+:.*": {"group_size": 16}}}
    for size in (16, 32):
        groups = 64 // size
        (recipe,) = told(
            options, qweight=("I32", (8, 16)), qzeros=("I32", (groups, 2)), scales=("F16", (groups, 16))
        ).values()
        assert (recipe.block, recipe.bits, recipe.shape) == ((1, size), 4, (16, 64))


def test_sizes_that_fit_alike_are_refused_and_not_guessed() -> None:
    options = {"bits": 4, "group_size": 24, "dynamic": {"+:.*": {"group_size": 28}}}
    with pytest.raises(Refused, match="24 or 28"):
        told(options, qweight=("I32", (6, 16)), qzeros=("I32", (2, 2)), scales=("F16", (2, 16)))


def test_widths_that_fit_alike_are_told_by_the_shape() -> None:
    options = {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}
    tensors = {"weight_packed": ("I32", (8, 4)), "weight_scale": ("BF16", (8, 1)), "weight_shape": ("I32", (2,))}
    for columns, bits in ((32, 4), (16, 8)):
        (recipe,) = told(options, (8, columns), **tensors).values()
        assert (recipe.bits, recipe.shape) == (bits, (8, columns))


def test_a_tensor_without_a_scale_is_no_weight_of_several() -> None:
    assert told({}, position_ids=("I64", (1, 4)), weight=("F8_E4M3", (4, 4))) == {}


def test_codes_of_no_format_are_refused_by_what_they_are() -> None:
    with pytest.raises(Refused, match="codes in I64, scale in F32"):
        told({}, weight=("I64", (4, 4)), weight_scale=("F32", (4, 1)))


@pytest.mark.parametrize(
    ("options", "less"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
        ({"packing_format": "auto_round"}, 0),
        ({"packing_format": "auto_round:gptqmodel"}, 0),
        ({"packing_format": "auto_round:auto_gptq"}, 1),
    ],
)
def test_who_stores_zero_points_less_one(options: dict[str, Any], less: int) -> None:
    (recipe,) = told(options, qweight=("I32", (8, 16)), qzeros=("I32", (1, 2)), scales=("F16", (1, 16))).values()
    assert recipe.less == less


@pytest.mark.parametrize("name", CONFIGS)
def test_references_read_what_was_written_under_every_configuration(name: str, tmp_path: Path) -> None:
    _, values = written("llama", CONFIGS[name], tmp_path)
    weights = Unpacked(Checkpoint.open(tmp_path))
    for part in ("up", "down"):
        own = f"model.layers.0.mlp.{part}_proj.weight"
        assert own in weights.packed
        np.testing.assert_array_equal(weights.read(own), values[f"layers.0.ffn.{part}.weight"])
