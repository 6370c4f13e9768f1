"""Parses `quantization_config` of every supported quantization tool into a scheme. No torch.

Nothing is guessed: a tool, a layout or an option that is not listed is refused by name, with what is known about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.formats.auto_round import auto_round
from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.compressed import compressed_tensors
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import WHOLE, Format
from firstlight.engine.weights.formats.modelopt import modelopt
from firstlight.engine.weights.formats.mxfp4 import MxFp4, MxFp4Blocks
from firstlight.engine.weights.formats.refusing import Options, flag_of, is_block, mapping, refuse
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme
from firstlight.engine.weights.formats.unread import HARMLESS, unread

LEVELS = ("text_config", "language_config", "llm_config", "thinker_config")
KEYS = ("quantization_config", "compression_config")
MLX = "quantization"  # where MLX says it as well, or alone
SETTINGS = ("bits", "group_size", "desc_act", "sym")  # of all modules or, by GPTQModel's `dynamic`, of some
KNOWN = {  # tools that are not read here -> what they do
    "bitsandbytes": "NF4, FP4 or INT8 codes with nested scales, in a layout of its own that only its kernels read",
    "aqlm": "additive codebooks; weights are sums of looked-up vectors",
    "bitblas": "words in the order that BitBLAS wants",
    "bitnet": "ternary weights, four in a byte, with one scale a tensor",
    "eetq": "INT8 in an order for its GPU kernels",
    "exl2": "codes of widths that differ from column to column, for the kernels of ExLlamaV2",
    "exl3": "trellis codes of rotated weights, for the kernels of ExLlamaV3",
    "fp_quant": "MXFP4 or NVFP4 of rotated weights: the rotation must be undone",
    "fouroversix": "NVFP4 or MXFP4 whose blocks go up to 4 or 6, with names and layouts of its own",
    "gemma": "codes of 2, 4 or 8 bits, whose widths regular expressions give, in a layout of Gemma's own",
    "gguf": "blocks of llama.cpp, in a file format of its own",
    "higgs": "codebooks of rotated weights",
    "metal": "affine groups for Apple's GPUs: U32 words with scales and biases",
    "mlx": "affine groups of Apple's MLX: U32 words with scales and biases",
    "nvfp4": "weights quantized when they are loaded",
    "paroquant": "INT4 of rotated weights: the rotation must be undone",
    "qqq": "INT4 words for its own kernels, whose inputs are INT8",
    "hqq": "half-quadratic codes with zero points in floats",
    "marlin": "INT4 words in the order that the Marlin kernels want",
    "quanto": "weights quantized when they are loaded",
    "quark": "AMD's exporter: FP8, MXFP4 or INT4, by its own layer_quant_config",
    "sinq": "codes with scales for rows and for columns",
    "spqr": "3-bit codes with sparse outliers",
    "torchao": "tensor subclasses of torch, flattened",
    "vptq": "vector codebooks",
}


def announced(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Scheme:
    """The scheme of a raw `config.json`; `beside` is ModelOpt's `hf_quant_config.json` where there is one.

    Raises `Refused` (unsupported-format, config-invalid) with the tool's name for what is not read here.
    """
    found = _announcement(config)
    if found is None:
        if not beside:
            return Scheme()
        found = {"quant_method": "modelopt", **mapping(beside)}
    if not isinstance(found, Mapping):
        refuse("quantization_config", found, "an object, or nothing")
    method = found.get("quant_method") or _implied(found)
    if method is not None and not isinstance(method, str):
        refuse("quant_method", method, "a name")
    reader = READERS.get(str(method).lower())
    if reader is None:
        _unknown(method, found)
    options = Options(found)
    return replace(reader(options, config), unread=unread(found, options.seen))


def _announcement(config: Mapping[str, Any]) -> Any:
    return next(iter(announcements(config).values()), None)


def announcements(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said about quantization, by where it stands, the outermost first: it is followed."""
    levels = {"": config, **{f"{key}.": mapping(config.get(key)) for key in LEVELS}}
    found = {f"{level}{key}": raw[key] for level, raw in levels.items() for key in KEYS if raw.get(key)}
    alone = mapping(config.get(MLX))
    return found or ({MLX: alone} if alone else {})


def every_format() -> tuple[type[Format], ...]:
    """The classes of all formats that are known: those above, and what has been defined beside them."""
    return Format.kinds()


def _implied(found: Mapping[str, Any]) -> str | None:
    """The tool of a configuration that does not name it, by a key that only one tool writes."""
    if "config_groups" in found:
        return "compressed-tensors"
    if "quant_algo" in found:
        return "modelopt"
    if "load_in_4bit" in found or "load_in_8bit" in found:
        return "bitsandbytes"
    return "mlx" if {"group_size", "bits"} <= set(found) else None


def _unknown(method: object, found: Mapping[str, Any]) -> NoReturn:
    what = ", ".join(f"{key} = {value}" for key, value in found.items() if isinstance(value, str | int | float))[:200]
    about = KNOWN.get(str(method).lower(), "nothing is known about it here")
    raise Refused(
        fatal(
            "unsupported-format",
            f"quantization {method!r} is not read here: {about}",
            file="config.json",
            expected="none, or quant_method " + ", ".join(sorted(READERS)),
            found=what or "no options",
            next="write engine/weights/formats/<format>.py, or use another copy of the release; nothing is guessed",
        )
    )


def _fp8(options: Options, config: Mapping[str, Any]) -> Scheme:
    """transformers' and vLLM's `fp8`: 128 x 128 blocks, or one scale a tensor or row where no block size is given."""
    code = options.one_of("fmt", {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3"}, "e4m3")
    block = options.get("weight_block_size", [1, 32] if options.get("quant_method") == "mxfp8" else None)
    if block is not None and not is_block(block):
        refuse("weight_block_size", block, "two positive numbers, rows and columns")
    size = (block[0], block[1]) if block is not None else (WHOLE, WHOLE)
    kept = (*options.names("modules_to_not_convert"), *options.names("ignored_layers"), *_skipped(options))
    list(_otherwise(options, ()))
    experts = config.get("expert_dtype") or mapping(config.get("text_config")).get("expert_dtype")
    experts = options.get("expert_dtype", experts)
    semantics = options.get("weight_scale_semantics")
    if semantics is not None:  # GPTQModel's: its scale is what its name says
        options.only("weight_scale_semantics", semantics, ("inverse",))
        options.seen.add("format")  # of the codes, which headers show
    if experts is None or semantics is not None:
        own = Fp8(block=size, code=code, suffix="weight_scale_inv", inverse=semantics is not None)
        return Scheme("fp8", (Group(own),), Modules(kept))
    if experts not in ("fp4", "fp8"):
        refuse("expert_dtype", experts, "fp4 or fp8")
    every = Group(Fp8(block=size, code=code, suffix="scale", scale="F8_E8M0"))
    fp4 = Group(MxFp4(names=("weight", "scale"), scale="F8_E8M0"), Modules(("experts",)))
    return Scheme("fp8", (fp4, every) if experts == "fp4" else (every,), Modules(kept))


def _fbgemm(options: Options, config: Mapping[str, Any]) -> Scheme:
    kept = Modules(options.names("modules_to_not_convert"))
    return Scheme("fbgemm_fp8", (Group(Fp8(block=(1, WHOLE))),), kept)


def _mxfp4(options: Options, config: Mapping[str, Any]) -> Scheme:
    """gpt-oss: experts alone."""
    kept = Modules(options.names("modules_to_not_convert"))
    return Scheme("mxfp4", (Group(MxFp4Blocks(), Modules(("experts",))),), kept)


def _awq(options: Options, config: Mapping[str, Any]) -> Scheme:
    options.only("bits", options.get("bits", options.get("w_bit", 4)), (4,))
    options.only("zero_point", options.get("zero_point", True), (True, False))
    symmetric = options.get("zero_point", True) is False
    for key in ("version", "format", "checkpoint_format"):
        if str(options.get(key, "gemm")).lower() != "gemm":
            options.unsupported(key, options.get(key), "gemm: words of gemv, marlin and exllama have another order")
    if options.get("backend") == "llm-awq":
        options.unsupported("backend", "llm-awq", "autoawq or none: its words have another order")
    _words(options)
    kept = Modules((*options.names("modules_to_not_convert"), *_skipped(options)))
    usual = options.get("group_size", options.get("q_group_size", 128))
    some = [
        Group(Awq(group=options.group(change.get("group_size", usual)), symmetric=symmetric), modules)
        for modules, change in _otherwise(options, ("group_size", "desc_act"))
    ]
    every = Group(Awq(group=options.group(usual), symmetric=symmetric))
    return Scheme("awq", (*some, every), kept, head=options.flag("lm_head"))


def _words(options: Options) -> None:
    """What words are made of."""
    options.only("pack_dtype", options.get("pack_dtype", "int32"), ("int32",))
    options.only("data_type", options.get("data_type", "int"), ("int",))


def _skipped(options: Options) -> list[str]:
    """Modules that GPTQModel's `dynamic` leaves plain, but for those that an earlier pattern names."""
    found, earlier = [], ""
    for pattern in mapping(options.get("dynamic")):
        own = ".*?" + pattern.removeprefix("-:").removeprefix("+:")
        if pattern.startswith("-:"):
            found.append(f"re:{earlier}{own}")
        else:
            earlier += f"(?!{own})"
    return found


def _otherwise(options: Options, known: tuple[str, ...]) -> Iterator[tuple[Modules, Mapping[str, Any]]]:
    """Modules whose settings GPTQModel's `dynamic` says, and these; the first pattern that names a module counts."""
    for pattern, change in mapping(options.get("dynamic")).items():
        if pattern.startswith("-:"):
            continue
        for key in sorted(mapping(change).keys() - set(known)):
            if key in SETTINGS or key not in HARMLESS:
                allowed = ", ".join(known) or "which modules stay plain"
                options.unsupported(
                    "dynamic", f"{pattern}: {key} = {change[key]}", f"that says of some modules {allowed}"
                )
        yield Modules(("re:.*?" + pattern.removeprefix("+:"),)), mapping(change)


def _gptq(options: Options, config: Mapping[str, Any]) -> Scheme:
    forms = [form for key in ("checkpoint_format", "format") if (form := options.get(key)) is not None] or ["gptq"]
    if any(form != forms[0] for form in forms):
        refuse("checkpoint_format and format", forms, "one and the same")
    options.only("checkpoint_format", forms[0], ("gptq", "gptq_v2"))
    options.only("is_marlin_format", bool(options.get("is_marlin_format", False)), (False,))
    _words(options)
    kept = [*options.names("modules_to_not_convert"), *_skipped(options)]
    inside = _flat(options.get("modules_in_block_to_quantize", []))
    every = Group(_gptq_format(options, forms[0], {}), Modules(inside) if inside else None)
    settings = _otherwise(options, SETTINGS)
    some = [Group(_gptq_format(options, forms[0], change), modules) for modules, change in settings]
    return Scheme("gptq", (*some, every), Modules(kept), head=options.flag("lm_head"))


def _gptq_format(options: Options, form: str, change: Mapping[str, Any]) -> Format:
    """Settings of all modules, or those that are otherwise for some."""
    usual = {key: options.get(key) for key in SETTINGS}
    said = {**usual, **{key: value for key, value in change.items() if value is not None}}
    bits = 4 if said["bits"] is None else said["bits"]
    options.only("bits", bits, (2, 3, 4, 8))
    writer = str(mapping(options.get("meta")).get("quantizer")).lower()
    offset = 0 if form == "gptq_v2" else 1
    version = re.search(r"gptqmodel:(\d+)", writer)
    if offset and bits == 3 and "gptqmodel" in writer and (version is None or int(version[1]) < 7):
        options.unsupported(
            "meta.quantizer",
            writer,
            "another: before its version 7 it took other numbers than one from zero points of 3 bits",
        )
    return Gptq(
        bits=bits,
        group=options.group(128 if said["group_size"] is None else said["group_size"]),
        zero_offset=offset,
        shuffled=flag_of("desc_act", said["desc_act"], False),
        symmetric=flag_of("sym", said["sym"], False),
        borrows="gptqmodel" in writer,
    )


def _flat(names: object) -> list[str]:
    """Names in lists of lists, or of any depth."""
    return [found for name in names for found in _flat(name)] if isinstance(names, list | tuple) else [str(names)]


Reader = Callable[[Options, Mapping[str, Any]], Scheme]
READERS: Mapping[str, Reader] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
}
