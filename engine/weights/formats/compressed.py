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
    groups, usual = [], options.get("format")
    for name, raw in object_of("config_groups", options.get("config_groups")).items():
        group = object_of(f"config_groups.{name}", raw)
        weights = object_of(f"config_groups.{name}.weights", group.get("weights"))
        if not weights:
            continue  # activations or caches alone
        layout = str(group.get("format") or usual or "none")
        format_ = _format(options, layout, weights)
        if format_ is not None:
            groups.append(Group(format_, _targets(group.get("targets"))))
    if not groups and usual not in (None, "dense") and "config_groups" not in options.raw:
        refuse("config_groups", None, "groups of modules and how each is stored")
    return Scheme("compressed-tensors", tuple(groups), Modules(options.names("ignore")), head=True)


def _targets(raw: object) -> Modules | None:
    """Names of modules; None where a class of modules is named, of which linear ones are meant, or embeddings."""
    names = [] if raw is None else raw
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        refuse("targets", raw, "a list of names")
    classes = [name for name in names if not name.startswith("re:") and name[:1].isupper() and "." not in name]
    if classes and all("Embedding" in name for name in classes) and len(classes) == len(names):
        return Modules(("re:.*embed[^.]*$", "wte"))
    return Modules(names) if names and not classes else None


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
