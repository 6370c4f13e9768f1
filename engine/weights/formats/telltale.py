"""Recognises quantization tools that config.json does not name, by files or tensor names only they write. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from firstlight.engine.findings import Finding, fatal

QUANTO, QUANTO_FILE = "optimum-quanto", "quanto_qmap.json"
ABOUT = {
    QUANTO: "codes of 2, 4 or 8 bits with a scale a row, a tensor subclass flattened into parts",
    "torchao": "tensor subclasses of torch, flattened into parts",
    "bitsandbytes": "NF4, FP4 or INT8 codes with nested scales, in a layout of its own that only its kernels read",
    "HQQ or SINQ": "codes with scales and zero points in floats, flattened",
    "AQLM": "additive codebooks; weights are sums of looked-up vectors",
    "VPTQ": "vector codebooks",
    "HIGGS": "codebooks of rotated weights",
    "SpQR": "3-bit codes with sparse outliers",
    "MLX": "affine groups of Apple's MLX: U32 words with scales and biases",
    "ExLlamaV2": "codes of widths that differ from column to column",
    "ExLlamaV3": "trellis codes of rotated weights",
    "compressed-tensors": "sparse weights with a bit mask",
}
ENDINGS = {  # of names -> the tool; a tool is told by all endings of a line
    ("weight._data", "weight._scale"): QUANTO,
    ("_weight_qdata",): "torchao",
    ("weight:_data",): "torchao",
    (".weight.absmax", ".weight.quant_map"): "bitsandbytes",
    (".SCB",): "bitsandbytes",
    (".W_q",): "HQQ or SINQ",
    (".codebooks", ".codes"): "AQLM",
    (".centroids.weight", ".indices"): "VPTQ",
    (".tables", ".tables2"): "HIGGS",
    (".dense_weights", ".row_offsets"): "SpQR",
    (".scales", ".biases"): "MLX",  # beside a weight of words
    (".q_weight", ".q_scale"): "ExLlamaV2",
    (".trellis", ".suh"): "ExLlamaV3",
    (".compressed", ".bitmask"): "compressed-tensors",
}


def by_files(names: Collection[str]) -> Finding | None:
    """The refusal of a tool that left its own file beside the weights, if one did."""
    return _refusal(QUANTO, QUANTO_FILE, (), f"{QUANTO_FILE} beside the weights") if QUANTO_FILE in names else None


def by_names(unconsumed: Iterable[str]) -> Finding | None:
    """The refusal of a tool that the names of tensors which no parameter consumes tell, if they tell one."""
    every = tuple(ending for endings in ENDINGS for ending in endings)
    first: dict[str, str] = {}
    for name in unconsumed:
        if name.endswith(every):
            for ending in filter(name.endswith, every):
                first.setdefault(ending, name)
    for endings, tool in ENDINGS.items():
        if first.keys() >= set(endings):
            named = tuple(first[ending] for ending in endings)
            return _refusal(tool, "config.json", named, f"tensors called {' and '.join(named)}")
    return None


def _refusal(tool: str, file: str, tensors: tuple[str, ...], found: str) -> Finding:
    return fatal(
        "unsupported-format",
        f"weights are stored as {tool} writes them, which is not read here ({ABOUT[tool]}), and config.json does not "
        "say so",
        file=file,
        tensors=tensors,
        expected="plain weights, or a quantization_config that is read here",
        found=found,
        next="use the plain copy of the release, or one in FP8, INT8, GPTQ, AWQ or MXFP4; nothing is guessed",
    )
