"""Every storage format: an instance of it, a configuration that announces it, and tensors as torch has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.files.safetensors_file import Tagged, Tensor, read, write
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import WHOLE, Box, Format
from firstlight.engine.weights.formats.int8 import Int8
from firstlight.engine.weights.formats.mxfp4 import MxFp4, MxFp4Blocks
from firstlight.engine.weights.formats.nvfp4 import NvFp4
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.formats.registry import QUANTIZED_ROLES
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.packed import part_names
from firstlight.engine.weights.packing import pack
from firstlight.engine.weights.published import published
from firstlight.engine.weights.recipes import Recipe, Said, recipes

FORMATS: dict[str, Format] = {
    "fp8": Fp8(),
    "fp8-rows": Fp8(block=(1, WHOLE), scale="BF16"),
    "fp8-blocks": Fp8(block=(16, 32), suffix="weight_scale_inv"),
    "fp8-inverse": Fp8(suffix="weight_scale_inv", inverse=True),
    "fp8-e5m2-ue8m0": Fp8(block=(16, 16), code="F8_E5M2", scale="F8_E8M0"),
    "mxfp8": Fp8(block=(1, 32), scale="U8"),
    "int8": Int8(),
    "int8-zero": Int8(zero_point=True),
    "int8-tensor": Int8(block=(WHOLE, WHOLE)),
    "mxfp4": MxFp4(),
    "mxfp4-ue8m0": MxFp4(names=("weight", "scale"), scale="F8_E8M0"),
    "mxfp4-blocks": MxFp4Blocks(),
    "nvfp4": NvFp4(),
    "nvfp4-modelopt": NvFp4(divide=False, dims=()),
    "packed-int4": PackedInt(bits=4, group=32),
    "packed-int8": PackedInt(bits=8, group=WHOLE),
    "packed-int2-zero": PackedInt(bits=2, group=WHOLE, zero_point=True),
    "packed-int4-zero": PackedInt(bits=4, group=16, zero_point=True),
    "packed-int4-ordered": PackedInt(bits=4, group=16, zero_point=True, ordered=True),
    "awq": Awq(group=16),
    "awq-whole": Awq(group=WHOLE, symmetric=True),
    "gptq": Gptq(group=16),
    "gptq-int8": Gptq(bits=8, group=WHOLE),
    "gptq-int3": Gptq(bits=3, group=32),
    "gptq-int6-v2": Gptq(bits=6, group=WHOLE, zero_offset=0, ordered=False),
    "gptq-int2-v2": Gptq(bits=2, group=32, zero_offset=0),
    "gptq-plain": Gptq(group=32, ordered=False, symmetric=True),
}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors configuration with one group of all linear modules but head and router."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}},
    }


CONFIGS: dict[str, Mapping[str, Any]] = {
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "float-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float-block": compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    "mxfp8": compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "packed-int4": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=4),
    "packed-int8": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "packed-ordered": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=8, symmetric=False, actorder="group"
    ),
    "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "fp8-modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate"]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    "gptq-int8": {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq-int3": {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True},
    "auto-round": {"quant_method": "auto-round", "bits": 3, "sym": False, "packing_format": "auto_round:auto_gptq"},
    "auto-round-awq": {
        "quant_method": "auto-round",
        "group_size": 16,
        "sym": False,
        "packing_format": "auto_round:auto_awq",
    },
}


def as_torch(tensor: Tensor) -> torch.Tensor:
    """A stored tensor in its own dtype."""
    if isinstance(tensor, Tagged):
        bits = np.ascontiguousarray(tensor.bits)
        return torch.from_numpy(bits.view(np.int16) if bits.itemsize == 2 else bits).view(STORED_DTYPES[tensor.tag])
    return torch.from_numpy(np.ascontiguousarray(tensor))


def tensors(stored: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """The parts of a weight by role."""
    return {role: as_torch(tensor) for role, tensor in stored.items()}


def recipe_of(format_: Format, stored: Mapping[str, torch.Tensor]) -> Recipe:
    """How references read a weight: from headers, and from what a configuration would say of its format."""
    name = "a.up" if format_.swapped else "a.weight"
    tags = {dtype: tag for tag, dtype in STORED_DTYPES.items()}
    infos = {}
    for part in format_.parts:
        own, tensor = part_names(name, part)[0], stored[part.role]
        infos[own] = TensorInfo(own, tags[tensor.dtype], tuple(tensor.shape), "", 0, tensor.nbytes)
    (recipe,) = recipes(infos, Said(options_of(format_)), lambda info: stored["shape"].tolist()).values()
    return recipe


def by_reference(format_: Format, stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """A whole weight as references read it; of the last word of a row, headers do not tell how full it is."""
    recipe = recipe_of(format_, stored)
    assert recipe.shape[:-1] == shape[:-1]
    assert 0 <= recipe.shape[-1] - shape[-1] < 32
    return published(recipe._replace(shape=shape), {role: stored[role] for role in recipe.tensors})


def options_of(format_: Format) -> dict[str, Any]:
    """What a configuration says of a format, as far as headers leave it open."""
    if isinstance(format_, Fp8) and format_.inverse:
        return {"weight_scale_semantics": "inverse"}
    if isinstance(format_, Fp8 | Int8):
        return {"weight_block_size": list(format_.block)} if all(format_.block) else {}
    said = {"bits": getattr(format_, "bits", 4), "group_size": getattr(format_, "group", None) or -1}
    if isinstance(format_, Gptq):
        said["checkpoint_format"] = "gptq" if format_.zero_offset else "gptq_v2"
    return said


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def part_of(format_: Format, stored: Mapping[str, torch.Tensor], box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """What the format makes of a box, from the part of each tensor that it asks for."""
    cut = {
        part.role: stored[part.role][tuple(slice(*bounds) for bounds in part.bounds(box, shape))]
        for part in format_.parts
    }
    return format_.unpack(cut, box, shape)


def quantize(home: Path, quantization: Mapping[str, Any], packed: Path, plain: Path) -> None:
    """Two copies of a checkpoint: one in the format that a configuration announces, and what that stands for, plain."""
    raw = json.loads((home / "config.json").read_text())
    scheme = announced({"quantization_config": quantization})
    spec, matcher = FAMILIES.describe(raw)
    roles = {param.name: param.role for param in spec.parameters() if len(param.shape) == 2}
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for path in sorted(home.glob("*.safetensors")):
        for name, value in read(path).items():
            match = matcher.match(name)
            assert match is not None, name
            assert isinstance(value, np.ndarray)
            role = roles.get(match.params[0].replace("{e}", "0")) if match.params else None
            format_ = scheme.of(name.removesuffix(".weight")) if role in QUANTIZED_ROLES else None
            stored[name] = values[name] = value
            if format_ is not None:
                del stored[name]
                turned = np.swapaxes(value, -1, -2) if format_.swapped else value
                parts, turned = pack(turned, format_, seed=len(stored))
                stored.update({part_names(name, part)[0]: parts[part.role] for part in format_.parts})
                values[name] = np.ascontiguousarray(np.swapaxes(turned, -1, -2) if format_.swapped else turned)
    for into, held, more in ((packed, stored, {"quantization_config": dict(quantization)}), (plain, values, {})):
        into.mkdir()
        write(into / "model.safetensors", held, {"format": "pt"})
        (into / "config.json").write_text(json.dumps({**raw, **more}))
