"""AutoRound's checkpoints: GPTQ's or AWQ's words, said by `packing_format`, with settings of some modules. No torch.

`auto_round:auto_gptq` has zero points stored less one, `auto_round` and `auto_round:gptqmodel` as they are, and
`auto_round:auto_awq` the words of AWQ's GEMM layout. Where nothing is said, `auto_round:gptq` is (transformers'
AutoRoundConfig). `extra_config` has by name, or by a regular expression that is searched for, what is otherwise for
some modules; sixteen bits are none at all. Source: https://github.com/intel/auto-round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.refusing import Options, flag_of, object_of, refuse
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme

AWQ, LESS_ONE, AS_IS = "auto_awq", "auto_gptq", "gptqmodel"
PACKINGS = {  # names of words -> what they are
    **dict.fromkeys(("auto", "auto_round:gptq", "auto_round:auto_gptq", "auto_round:exllamav2"), LESS_ONE),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), AS_IS),
    **dict.fromkeys(("auto_round:awq", "auto_round:auto_awq"), AWQ),
}
KNOWN = {  # that are not read here -> what they are
    "auto_round:llm_compressor": "FP8, MXFP4 or NVFP4 as compressed-tensors has them, without config_groups",
    "auto_round:fp8_static": "FP8 with scales for activations, under names of its own",
    "auto_round:fake": "weights rounded to codes and stored as numbers",
    "auto_round:gguf": "blocks of llama.cpp",
    "auto_round:mlx": "affine groups of Apple's MLX",
    "mlx": "affine groups of Apple's MLX",
}
SETTINGS = ("bits", "group_size", "sym")
BITS = (2, 3, 4, 5, 6, 7, 8)
PLAIN_BITS = 16
_EXPRESSION = re.compile(r"[\\\[\](){}^$+?|*]")


def auto_round(options: Options, config: Mapping[str, Any]) -> Scheme:
    """The scheme of an AutoRound configuration. Raises `Refused` for words and settings that are not read here."""
    said = str(options.get("packing_format", "auto_round:gptq"))
    if said not in PACKINGS:
        expected = f"one of {', '.join(PACKINGS)}"
        options.unsupported("packing_format", said, f"{expected}; {KNOWN.get(said, 'nothing is known about it here')}")
    packing = PACKINGS[said]
    _refuse_others(options, options.raw, "")
    options.seen.update(("block_name_to_quantize", "to_quant_block_names", "extra_config", *SETTINGS))
    usual = {"bits": 4, "group_size": 128, "sym": True, **_settings(options.raw)}
    named: dict[Format, list[str]] = {}
    searched: list[Group] = []
    plain = [f"re:.*?(?:{name})" for name in options.names("modules_to_not_convert")]
    earlier = ""
    changes = object_of("extra_config", options.raw.get("extra_config"))
    for name in sorted(changes, key=lambda name: _EXPRESSION.search(name) is not None):  # names come before expressions
        change = object_of(f"extra_config.{name}", changes[name])
        _refuse_others(options, change, f"extra_config.{name}.")
        format_ = _format(options, packing, {**usual, **_settings(change)})
        if _EXPRESSION.search(name) is None:
            named.setdefault(format_, []).append(name) if format_ is not None else plain.append(name)
            continue
        own = f".*?(?:{name})"
        if format_ is None:
            plain.append(f"re:{earlier}{_none_of(named)}{own}")
        else:
            searched.append(Group(format_, Modules((f"re:{earlier}{own}",))))
        earlier += f"(?!{own})"
    blocks = _blocks(options)
    every = _format(options, packing, usual)
    groups = [Group(format_, Modules(names)) for format_, names in named.items()] + searched
    if every is not None:
        groups.append(Group(every, Modules(blocks) if blocks else None))
    head = any(name.split(".")[-1] == "lm_head" for names in named.values() for name in names)
    return Scheme("auto-round", tuple(groups), Modules(plain), head=head)


def _settings(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: said[key] for key in SETTINGS if said.get(key) is not None}


def _refuse_others(options: Options, said: Mapping[str, Any], where: str) -> None:
    """Settings that ask for another layout, or for other mathematics."""
    options.seen.update(("data_type", "act_bits", "super_bits", "super_group_size", "rotation_config"))
    for key, usual in (("data_type", "int"), ("super_bits", None), ("super_group_size", None), ("rotation_config", {})):
        if said.get(key, usual) not in (usual, None):
            options.unsupported(f"{where}{key}", said[key], str(usual or "none"))
    if said.get("act_bits") is not None and (type(said["act_bits"]) is not int or said["act_bits"] < PLAIN_BITS):
        options.unsupported(f"{where}act_bits", said["act_bits"], f"{PLAIN_BITS} or none: scales of inputs are apart")


def _format(options: Options, packing: str, said: Mapping[str, Any]) -> Format | None:
    """The words of modules with these settings; None for those that stay plain."""
    bits, group = said["bits"], said["group_size"]
    if type(bits) is int and bits >= PLAIN_BITS:
        return None
    symmetric = flag_of("sym", said["sym"], True)
    if packing == AWQ:
        options.only("bits", bits, (4,))
        return Awq(group=options.group(group), symmetric=symmetric)
    options.only("bits", bits, BITS)
    offset = 1 if packing == LESS_ONE else 0
    return Gptq(bits=bits, group=options.group(group), zero_offset=offset, ordered=False, symmetric=symmetric)


def _blocks(options: Options) -> tuple[str, ...]:
    """What names of quantized modules begin with; nothing where all blocks are."""
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        said = options.raw.get(key)
        found = _flat(said.split(",") if isinstance(said, str) else said or [])
        if any(not isinstance(name, str) for name in found):
            refuse(key, said, "names of blocks")
        if found:
            return tuple(dict.fromkeys(str(name).strip().rstrip(".") for name in found))
    return ()


def _flat(names: object) -> list[object]:
    return [one for name in names for one in _flat(name)] if isinstance(names, list | tuple) else [names]


def _none_of(named: Mapping[Format, list[str]]) -> str:
    """An expression that holds nowhere among modules that are named."""
    names = [re.escape(name) for some in named.values() for name in some]
    return f"(?!(?:.*\\.)?(?:{'|'.join(names)})$)" if names else ""
