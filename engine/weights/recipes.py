"""How stored tensors make weights, by their headers and the raw configuration alone: what references go by.

`formats` read what a configuration says of each module, and check headers against it; engines compute with that.
This looks at the tensors first: which lie beside each other, in which dtypes and shapes. Codes of how many bits, in
groups of how many inputs, whether there are zero points, orders, outer scales: headers tell. Of the configuration only
what they do not tell is looked up, wherever it stands: sizes of blocks, of which the one that fits the shapes counts,
and whether zero points are stored less one. No line is shared with `formats`, so that an option that is misread on one
side shows when the two are compared. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.files.header import TensorInfo

PLACES = ("quantization_config", "compression_config", "quantization")  # of a configuration that say how it is stored
ROLES = {  # how the names of a weight's tensors end -> what they are; codes are named by their main tensor
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "scale": "scale",
    "scale_inv": "scale",
    "scales": "scale",
    "weight_zero_point": "zero",
    "zero_point": "zero",
    "qzeros": "zero",
    "weight_g_idx": "order",
    "g_idx": "order",
    "weight_shape": "shape",
    "shape": "shape",
    "weight_scale_2": "outer",
    "scale_2": "outer",
    "weight_global_scale": "outer",
    "global_scale": "outer",
}
CODES = {"qweight": "weight", "weight_packed": "weight", "_packed": "", "_blocks": ""}  # endings -> the weight's own
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOATS = ("F32", "BF16", "F16", "F64")
EXPONENTS = ("U8", "F8_E8M0")
WORD = 32
ALL = 0  # of a block: every row, or every column
Block = tuple[int, int]
Way = TypeVar("Way")


class Recipe(NamedTuple):
    """What a weight [..., rows, columns] is made of: `formula` names the one of `published`, `tensors` are by role.

    `block`: rows and columns that share a scale, 0 for all. `less`: what was taken from zero points before they were
    stored. `divides`: by what is stored as a scale, or as the outer one. `turned`: it is used as [..., columns, rows].
    """

    formula: str
    shape: tuple[int, ...]
    tensors: Mapping[str, TensorInfo]
    block: Block
    bits: int = 8
    less: int = 0
    divides: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Said:
    """A configuration, as far as headers leave something open."""

    options: Mapping[str, Any]

    def everywhere(self, *keys: str) -> Iterator[Any]:
        """All values of these keys, at any depth."""
        waiting: list[object] = [self.options]
        while waiting:
            one = waiting.pop(0)
            if isinstance(one, Mapping):
                yield from (one[key] for key in keys if one.get(key) is not None)
                waiting += one.values()
            elif isinstance(one, list | tuple):
                waiting += one

    @property
    def blocks(self) -> list[Block]:
        """Rows and columns that may share a scale; what tools take where nothing is said, where nothing is."""
        pairs = self.everywhere("weight_block_size", "block_structure")
        found = [(one[0], one[1]) for one in pairs if isinstance(one, list | tuple) and len(one) == 2]
        found += [(1, size) for size in self._sizes("group_size")]
        return found or [(128, 128), (1, 32)]

    @property
    def groups(self) -> list[int]:
        """Inputs that may share a scale."""
        return self._sizes("group_size", "q_group_size") or [128]

    @property
    def widths(self) -> list[int]:
        """Bits that codes may have."""
        return [size for size in self._sizes("bits", "w_bit", "num_bits") if size in range(2, 9)] or [4]

    def _sizes(self, *keys: str) -> list[int]:
        return list(dict.fromkeys(size for size in self.everywhere(*keys) if type(size) is int and size > 0))

    @property
    def takes_one(self) -> bool:
        """Whether zero points were stored less one: as GPTQ began, and as AutoRound writes under two of its names."""
        packing = self.options.get("packing_format")
        if packing is not None:
            return packing not in ("auto_round", "auto_round:gptqmodel")
        return "gptq_v2" not in (self.options.get("checkpoint_format"), self.options.get("format"))

    @property
    def inverts(self) -> bool:
        """Whether codes are divided by scales."""
        return self.options.get("weight_scale_semantics") == "inverse"


def said(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Said:
    """What a raw config.json says, at whichever level it does, or ModelOpt's file `beside` it."""
    waiting: list[Mapping[str, Any]] = [config]
    while waiting:
        level = waiting.pop(0)
        for place in PLACES:
            if isinstance(level.get(place), Mapping) and level[place]:
                return Said(level[place])
        waiting += [value for value in level.values() if isinstance(value, Mapping)]
    return Said(beside or {})


@dataclass(frozen=True)
class Found:
    """Tensors that lie beside each other under one name, by role, the codes' among them, and what was said.

    `endings`: of their names, by role. `numbers` reads a tensor of a few whole numbers.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    endings: Mapping[str, str]
    said: Said
    numbers: Callable[[TensorInfo], Sequence[int]]

    @property
    def codes(self) -> TensorInfo:
        return self.tensors["codes"]

    def dtype(self, role: str) -> str:
        """Of the tensor of a role; empty where there is none."""
        return self.tensors[role].dtype if role in self.tensors else ""

    def only(self, expected: str, ways: Iterable[Way]) -> Way:
        """The way in which the shapes can be read. Raises `Refused` where there is none, or several."""
        fitting = list(dict.fromkeys(ways))
        if len(fitting) != 1:
            self.refuse(expected, " or ".join(map(str, fitting)) or "nothing that is said fits")
        return fitting[0]

    def refuse(self, expected: str, found: str) -> NoReturn:
        raise Refused(
            fatal(
                "unsupported-format",
                f"{self.name}: headers and configuration do not tell the reference how it is stored",
                file=self.codes.file,
                tensors=tuple(info.name for info in self.tensors.values()),
                expected=expected,
                found=found,
                next="verify against a golden file (--golden) made where the reference runs",
            )
        )


Teller = Callable[[Found], Recipe | None]


def recipes(
    tensors: Mapping[str, TensorInfo], what: Said, numbers: Callable[[TensorInfo], Sequence[int]]
) -> dict[str, Recipe]:
    """Every weight that lies in several tensors, by its own name; `numbers` reads a tensor of a few whole numbers.

    Raises `Refused` (unsupported-format).
    """
    found = (_beside(info, tensors, what, numbers) for info in tensors.values() if info.dtype not in FLOATS)
    return {one.name: _recipe(one) for one in found if one is not None}


def _beside(
    codes: TensorInfo, tensors: Mapping[str, TensorInfo], what: Said, numbers: Callable[[TensorInfo], Sequence[int]]
) -> Found | None:
    """Codes with what lies beside them; None for a tensor without a scale, and for what lies beside codes itself."""
    if codes.name.endswith(tuple(ROLES)) and not codes.name.endswith(tuple(CODES)):
        return None
    own = (codes.name.removesuffix(ending) + end for ending, end in CODES.items() if codes.name.endswith(ending))
    name = next(own, codes.name)
    stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    endings = {role: end for end, role in ROLES.items() if stem + end in tensors}
    if "scale" not in endings:
        return None
    by_role = {"codes": codes, **{role: tensors[stem + end] for role, end in endings.items()}}
    return Found(name, by_role, endings, what, numbers)


def _recipe(found: Found) -> Recipe:
    told = (teller(found) for teller in TELLERS)
    recipe = next((one for one in told if one is not None), None)
    if recipe is None:
        dtypes = ", ".join(f"{role} in {info.dtype}" for role, info in found.tensors.items())
        found.refuse("codes and scales of a format that is read here", dtypes)
    return recipe


def _count(length: int, size: int) -> int:
    """How many blocks of a size there are in so many rows or columns."""
    return -(-length // size)


def _grid(found: Found, shape: tuple[int, ...], role: str = "scale") -> tuple[int, int]:
    """How many blocks a scale has in rows and columns: [R, C], [R, 1, C, 1], [R], [1] or a number alone."""
    own = found.tensors[role].shape[len(shape) - 2 :]
    if len(own) == 4:
        return own[0], own[2]
    return (own[0], own[1]) if len(own) == 2 else ((own[0] if own else 1), 1)


def _scaled_blocks(found: Found, shape: tuple[int, ...], candidates: Iterable[Block]) -> Block:
    """The block of each scale: the number of scales alone tells one a tensor and one a row."""
    rows, columns = shape[-2:]
    grid = _grid(found, shape)
    if grid == (1, 1):
        return ALL, ALL
    if grid == (rows, 1):
        return 1, ALL
    fitting = (block for block in candidates if (_count(rows, block[0]), _count(columns, block[1])) == grid)
    return found.only(f"blocks of which {list(grid)} cover {[rows, columns]}", fitting)


def _plain_codes(found: Found) -> Recipe | None:
    """Eight bits a code, and a scale for each block."""
    is_float = found.codes.dtype in EIGHT_BITS
    if not is_float and (found.codes.dtype != "I8" or found.dtype("scale") in EXPONENTS):
        return None
    shape = found.codes.shape
    block = _scaled_blocks(found, shape, found.said.blocks)
    divides = is_float and found.said.inverts
    return Recipe("float" if is_float else "whole", shape, found.tensors, block, divides=divides)


def _microscaled(found: Found) -> Recipe | None:
    """Two E2M1 codes a byte and an exponent for each 32 of them; experts' may lie in blocks of sixteen bytes."""
    if found.codes.dtype not in ("U8", "I8") or found.dtype("scale") not in EXPONENTS:
        return None
    *lead, last = found.codes.shape
    in_blocks = found.codes.name.endswith("_blocks")
    columns = lead.pop() * last * 2 if in_blocks else last * 2
    return Recipe("exponents", (*lead, columns), found.tensors, (1, 32), bits=4, turned=in_blocks)


def _two_scales(found: Found) -> Recipe | None:
    """Two E2M1 codes a byte, a scale of eight bits for each 16 and one for all: divided by, under the longer name."""
    if found.codes.dtype != "U8" or "outer" not in found.tensors or found.dtype("scale") not in EIGHT_BITS:
        return None
    shape = (*found.codes.shape[:-1], 2 * found.codes.shape[-1])
    divides = found.endings["outer"].endswith("global_scale")
    return Recipe("twice", shape, found.tensors, (1, 16), bits=4, divides=divides)


def _words(found: Found) -> Recipe | None:
    """Whole numbers of 2, 4 or 8 bits in words along the inputs, row by row."""
    if found.codes.dtype != "I32" or found.codes.name.endswith("qweight"):
        return None
    *lead, rows, words = found.codes.shape
    groups = _grid(found, (*lead, rows, words))[1]
    sizes = [ALL] if groups == 1 or "order" in found.tensors else found.said.groups
    ways = [
        (bits, size)
        for bits in found.said.widths
        for size in sizes
        if bits in (2, 4, 8) and _zeros_fit(found, rows, bits)
    ]
    by_words = {way for way in ways if way[1] == ALL or _count(words * WORD // way[0], way[1]) == groups}
    if len(by_words) > 1 and "shape" in found.tensors:
        columns = found.numbers(found.tensors["shape"])[-1]
        by_words = {(b, size) for b, size in by_words if -(-columns * b // WORD) == words}
    bits, size = found.only(f"codes in {words} words, and {groups} groups", by_words)
    return Recipe("words", (*lead, rows, words * WORD // bits), found.tensors, (1, size), bits=bits)


def _zeros_fit(found: Found, rows: int, bits: int) -> bool:
    """Whether zero points in words along the rows are as many as codes of that width ask for."""
    return "zero" not in found.tensors or found.tensors["zero"].shape[-2] == -(-rows * bits // WORD)


def _turned_words(found: Found) -> Recipe | None:
    """Words along the inputs (GPTQ) or along the outputs (AWQ), inputs first; scales are as many as outputs."""
    if not found.codes.name.endswith("qweight") or "zero" not in found.tensors:
        return None
    *lead, first, second = found.codes.shape
    groups, outputs = found.tensors["scale"].shape[-2:]
    if second * 8 == outputs:
        shape = (*lead, outputs, first)
        return Recipe("outputs", shape, found.tensors, (1, _group(found, first, groups)), bits=4)
    words, order = found.tensors["zero"].shape[-1], found.tensors.get("order")
    ways = (bits for bits in found.said.widths if words == _in_words(outputs, bits))
    ways = (bits for bits in ways if order is None or first == _in_words(order.shape[-1], bits))
    bits = found.only(f"{words} words of {outputs} zero points, {first} of inputs", ways)
    inputs = first * WORD // bits if order is None else order.shape[-1]
    size = _group(found, inputs, groups) if order is None else ALL
    less = int(found.said.takes_one)
    return Recipe("inputs", (*lead, outputs, inputs), found.tensors, (1, size), bits=bits, less=less)


def _in_words(count: int, bits: int) -> int:
    """Words for so many codes: of widths that divide no word 32 codes lie in as many words, over their edges."""
    return _count(count, WORD) * bits if WORD % bits else _count(count, WORD // bits)


def _group(found: Found, inputs: int, groups: int) -> int:
    """Inputs that share a scale."""
    sizes = [ALL] if groups == 1 else [size for size in found.said.groups if _count(inputs, size) == groups]
    return found.only(f"groups of which {groups} cover {inputs} inputs", sizes)


TELLERS: tuple[Teller, ...] = (_turned_words, _words, _two_scales, _microscaled, _plain_codes)
