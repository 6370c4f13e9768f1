"""Parses compressed-tensors configurations: groups of modules, each with its own format. No torch.

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.grid import WHOLE, Format
from firstlight.engine.weights.formats.int8 import Int8
from firstlight.engine.weights.formats.mxfp4 import MxFp4
from firstlight.engine.weights.formats.nvfp4 import NvFp4
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.formats.refusing import Options, flag_of, is_block, mapping, object_of, refuse
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme

EMBEDDINGS = ["re:.*embed[^.]*$", "wte"]
UNKNOWN = "nothing is known about it here"
KNOWN = {  # layouts that are not read here -> what they are
    "marlin-24": "INT4 with 2:4 sparsity, in an order for the Marlin kernels",
    "sparse-24-bitmask": "2:4 sparse weights with a bit mask",
    "sparse-bitmask": "sparse weights with a bit mask",
    "mxfp6-pack-quantized": "6-bit codes over byte boundaries",
}


def compressed_tensors(options: Options, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a compressed-tensors configuration. Raises `Refused` for layouts that are not read here."""
    sparse = str(object_of("sparsity_config", options.get("sparsity_config")).get("format", "dense"))
    if sparse != "dense":
        options.unsupported("sparsity_config.format", sparse, f"dense; {KNOWN.get(sparse, UNKNOWN)}")
    if mapping(options.get("transform_config")).get("config_groups"):
        options.unsupported("transform_config", "rotations", "none: activations would have to be rotated as well")
    usual = options.get("format")
    formats: dict[str | None, Format] = {}  # by target, None for every linear module; a later group counts
    for name, raw in object_of("config_groups", options.get("config_groups")).items():
        group = object_of(f"config_groups.{name}", raw)
        weights = object_of(f"config_groups.{name}.weights", group.get("weights"))
        if not weights:
            continue  # activations or caches alone
        layout = str(group.get("format") or usual or "none")
        format_ = _format(options, layout, weights)
        if format_ is not None:
            formats.update(dict.fromkeys(_targets(group.get("targets")), format_))
    if not formats and usual not in (None, "dense") and "config_groups" not in options.raw:
        refuse("config_groups", None, "groups of modules and how each is stored")
    return Scheme("compressed-tensors", _in_order(formats), Modules(options.names("ignore")), head=True)


def _targets(raw: object) -> tuple[str | None, ...]:
    """Names of modules, and None for a class of modules: linear ones are meant, or embeddings, which have names."""
    names = [] if raw is None else raw
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        refuse("targets", raw, "a list of names")
    found: list[str | None] = []
    for name in names:
        is_class = not name.startswith("re:") and name[:1].isupper() and "." not in name
        found += [name] if not is_class else EMBEDDINGS if "Embedding" in name else [None]
    return tuple(found) if found else (None,)


def _in_order(formats: Mapping[str | None, Format]) -> tuple[Group, ...]:
    """Names count before expressions, these by the alphabet, and both before classes (`match_targets`)."""
    named: dict[Format, list[str]] = {}
    groups: list[Group] = []
    for target in sorted(filter(None, formats), key=lambda target: (target.startswith("re:"), target)):
        if target.startswith("re:"):
            groups.append(Group(formats[target], Modules((target,))))
        else:
            named.setdefault(formats[target], []).append(target)
    groups = [Group(format_, Modules(names)) for format_, names in named.items()] + groups
    return (*groups, *([Group(formats[None])] if None in formats else []))


def _format(options: Options, layout: str, weights: Mapping[str, Any]) -> Format | None:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if layout == "dense":
        return None
    options.only("weights.type", kind, ("int", "float"))
    symmetric = flag_of("weights.symmetric", weights.get("symmetric"), True)
    if layout in ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized"):
        is_whole = layout == "int-quantized" and kind == "int"  # fewer bits lie in bytes of their own as well
        options.only("weights.num_bits", bits, (4, 8) if is_whole else (8,))
        if layout == "mxfp8-quantized":
            return Fp8(block=(1, 32), scale="U8")
        if kind == "float":
            return Fp8(block=_block(weights), scale="BF16")
        return Int8(block=_block(weights), zero_point=not symmetric)
    if layout == "pack-quantized":
        options.only("weights.type", kind, ("int",))
        options.only("weights.num_bits", bits, (2, 4, 8))
        rows, group = _block(weights)
        if rows != 1:
            options.unsupported("weights.strategy", weights.get("strategy"), "group or channel")
        return PackedInt(
            bits=int(str(bits)),
            group=group,
            zero_point=not symmetric,
            ordered=weights.get("actorder") in ("group", "dynamic", True),
        )
    if layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        own: Format = MxFp4() if layout.startswith("mxfp4") else NvFp4()
        size = 32 if layout.startswith("mxfp4") else 16
        options.only("weights.num_bits", 4 if bits is None else bits, (4,))
        options.only("weights.group_size", weights.get("group_size") or size, (size,))
        return own
    return options.unsupported("format", layout, f"a layout read here; {KNOWN.get(layout, UNKNOWN)}")


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy, structure = weights.get("strategy"), weights.get("block_structure")
    group = weights.get("group_size")
    if strategy is None:
        strategy = "group" if group not in (None, -1) else "channel" if group == -1 else "tensor"
    if strategy == "block" and is_block(structure):
        return structure[0], structure[1]
    if strategy in ("group", "tensor_group") and type(group) is int and (group > 0 or group == -1):
        return 1, WHOLE if group < 0 else group
    if strategy == "tensor":
        return WHOLE, WHOLE
    if strategy != "channel":
        refuse("weights.strategy", {"strategy": strategy, "group_size": group, "block_structure": structure}, "a grid")
    return 1, WHOLE
