"""NVIDIA ModelOpt's unified checkpoints: `quant_algo` for all modules, or for each (https://github.com/NVIDIA/Model-Optimizer).

The same object stands in `config.json` or, older, in `hf_quant_config.json` under `quantization`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.grid import WHOLE, Format
from firstlight.engine.weights.formats.mxfp4 import MxFp4
from firstlight.engine.weights.formats.nvfp4 import NvFp4
from firstlight.engine.weights.formats.refusing import Options, mapping
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme

FORMATS: Mapping[str, Format] = {
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(block=(1, WHOLE)),
    "FP8_PB_WO": Fp8(block=(128, 128)),
    "FP8_PB": Fp8(block=(128, 128)),
    "NVFP4": NvFp4(divide=False, dims=()),
    "W4A16_NVFP4": NvFp4(divide=False, dims=()),
    "W4A8_NVFP4_FP8": NvFp4(divide=False, dims=()),
    "MXFP4": MxFp4(names=("weight", "weight_scale")),
    "W4A8_MXFP4_FP8": MxFp4(names=("weight", "weight_scale")),
    "MXFP8": Fp8(block=(1, 32), scale="U8"),
}
KNOWN = {  # that are not read here -> what they are
    "NVFP4_AWQ": "NVFP4 whose inputs are scaled first (pre_quant_scale)",
    "W4A16_AWQ": "INT4 in bytes, whose inputs are scaled first (pre_quant_scale)",
    "W4A8_AWQ": "INT4 over FP8, whose inputs are scaled first (pre_quant_scale)",
    "NVFP4_SVD": "NVFP4 whose inputs are scaled first (pre_quant_scale), beside factors of low rank",
    "INT8_SQ": "INT8 whose inputs are smoothed first (pre_quant_scale)",
    "W8A8_SQ_PER_CHANNEL": "INT8 whose inputs are smoothed first (pre_quant_scale)",
    "W8A16": "INT8 with a scale per row, for the kernels of TensorRT-LLM",
}


def modelopt(options: Options, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a ModelOpt configuration. Raises `Refused` for an algorithm that is not read here."""
    own = Options({**options.raw, **mapping(options.get("quantization"))}, options.seen)
    options.seen.add("config_groups")  # the same once more, as compressed-tensors has it
    kept = Modules((*own.names("exclude_modules"), *own.names("ignore")))
    if own.get("quant_algo") is None and own.get("kv_cache_quant_algo") is not None:
        return Scheme("modelopt")  # caches alone
    algorithm = str(own.get("quant_algo", "none")).upper()
    if algorithm == "MIXED_PRECISION":
        modules: dict[str, list[str]] = {}
        for module, layer in mapping(own.get("quantized_layers")).items():
            modules.setdefault(str(mapping(layer).get("quant_algo", "none")).upper(), []).append(module)
        return Scheme(
            "modelopt",
            tuple(Group(_format(own, name), Modules(names)) for name, names in modules.items()),
            kept,
        )
    return Scheme("modelopt", (Group(_format(own, algorithm)),), kept, head=True)


def _format(options: Options, algorithm: str) -> Format:
    if algorithm not in FORMATS:
        about = KNOWN.get(algorithm, "nothing is known about it here")
        options.unsupported("quant_algo", algorithm, f"one of {', '.join(FORMATS)}: {about}")
    found = FORMATS[algorithm]
    if isinstance(found, NvFp4 | MxFp4):
        size = 16 if isinstance(found, NvFp4) else 32
        options.only("group_size", options.get("group_size", size), (size,))
    return found
