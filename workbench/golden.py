"""Golden files: a reference's inputs and outputs in one safetensors file, read, checked and written. No torch.

Names: `input_ids` [batch, tokens]; `attention_mask` (0 = padding, left or right); picture tensors as the vendor's
processor names them; `logits` [batch, tokens, vocabulary]; `hidden.0` ... `hidden.L` [batch, tokens, width] (hidden.0
the decoder's input after placeholders were filled, hidden.i the output of layer i, the last one after the final norm);
`unnormed` [batch, tokens, width], the output of the last layer in front of the final norm, which hides its scale;
`image_features` [n, width]; `generated` [batch, steps]; `position_ids` [batch, tokens], where the reference was given
some, for text alone. Anything else is left alone and named in `ignored`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, what_is
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.weights.files.safetensors_file import Tagged, read, write

Arrays = dict[str, NDArray[Any]]
PICTURE_NAMES = frozenset(
    """pixel_values pixel_attention_mask pixel_position_ids image_grid_thw grid_thws image_grid_hws image_sizes
    image_attention_mask image_position_ids aspect_ratio_ids aspect_ratio_mask spatial_shapes num_crops""".split()
)
NO_PICTURES = re.compile(r"pixel_values_videos|video_grid_thw|input_features|input_values|feature_attention_mask")
OUTPUTS = re.compile(r"hidden\.\d+|unnormed|logits|image_features|generated")


@dataclass(frozen=True, slots=True)
class Golden:
    """What a reference was given and what came out; `mask` [batch, tokens] is True at real tokens.

    `outputs` holds hidden.i, unnormed, logits, image_features and generated under these names, float32 (generated
    int64).
    """

    source: str
    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    pictures: Arrays = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Golden:
        """The golden file at `path`. Raises `Refused`: not-found, bad-golden, and what a broken file deserves."""
        if (what := what_is(path)) == "a directory":
            raise Refused(
                fatal(
                    "not-found",
                    f"{path} is no golden file",
                    file=str(path),
                    expected="a safetensors file of inputs and what they give",
                    found=what,
                    next="correct --golden",
                )
            )
        return cls.of(read(path), str(path))

    @classmethod
    def of(cls, tensors: Mapping[str, Any], source: str) -> Golden:
        """Tensors by name as a golden set; shapes that contradict each other are refused."""
        plain = {name: _plain(source, name, tensor) for name, tensor in tensors.items()}
        for name in filter(NO_PICTURES.fullmatch, plain):
            _refuse(source, name, "text and pictures: videos and sounds are not taken", _form(plain[name]))
        if "input_ids" not in plain:
            _refuse(source, "input_ids", "integers [batch, tokens]", "absent")
        ids = plain["input_ids"]
        if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
            _refuse(source, "input_ids", "int64 [batch, tokens]", _form(ids))
        outputs = {name: _output(source, name, value, ids) for name, value in plain.items() if OUTPUTS.fullmatch(name)}
        if not outputs:
            _refuse(source, "logits", "logits, hidden.i, image_features or generated", "nothing to compare with")
        counted = plain.get("position_ids")  # of one count: others, such as those of grids, are found anew
        if counted is None or counted.shape != ids.shape or counted.dtype.kind not in "iu":
            counted = None
        pictures = {name: plain[name] for name in sorted(PICTURE_NAMES & plain.keys())}
        given = {} if counted is None or pictures else {"position_ids": counted.astype(np.int64)}
        known = {"input_ids", "attention_mask", *outputs, *pictures, *given}
        return cls(
            source=source,
            input_ids=ids.astype(np.int64),
            mask=_mask(source, plain.get("attention_mask"), ids),
            pictures=pictures | given,
            outputs=outputs,
            ignored=tuple(sorted(plain.keys() - known)),
        )

    def write(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the golden file; what was ignored is not written."""
        write(path, {**self.inputs(), **self.outputs}, metadata)

    def inputs(self) -> Arrays:
        """What the reference is given, under the names of the file; no mask where nothing is padded.

        Unless positions are given: transformers takes a leap between them for the start of another text, if it is told
        of no mask.
        """
        mask = (
            {}
            if self.mask.all() and "position_ids" not in self.pictures
            else {"attention_mask": self.mask.astype(np.int64)}
        )
        return {"input_ids": self.input_ids, **mask, **self.pictures}

    def check(self, spec: ModelSpec) -> tuple[Finding, ...]:
        """Hold the shapes against the model's; refused where they differ. Returns what is worth knowing."""
        widths = {"logits": (spec.vocab_size, "vocabulary"), "image_features": (spec.hidden, "hidden width")}
        widths["unnormed"] = (spec.hidden_width(spec.num_layers - 1), "hidden width")
        widths |= {f"hidden.{i}": (spec.hidden_width(i), "hidden width") for i in range(spec.num_layers + 1)}
        for name, value in self.outputs.items():
            if name == "generated":
                continue
            if name not in widths:
                _refuse(self.source, name, f"hidden.0 to hidden.{spec.num_layers}", name)
            width, what = widths[name]
            if width and value.shape[-1] != width:
                _refuse(self.source, name, f"{what} {width} in the last dim", str(list(value.shape)))
        if spec.vision is None and (names := ", ".join(self.pictures.keys() & PICTURE_NAMES)):
            _refuse(self.source, names, "no picture tensors: this model has no vision tower", names)
        return self.remarks()

    def remarks(self) -> tuple[Finding, ...]:
        """What is ignored, and that the reference's own numbers are finite (refused otherwise)."""
        for name, value in self.outputs.items():
            real = value[self.mask] if value.shape[:2] == self.mask.shape and name != "generated" else value
            if value.dtype.kind == "f" and not np.isfinite(real).all():
                where = [int(i) for i in np.argwhere(~np.isfinite(real))[0]]
                _refuse(self.source, name, "finite numbers", f"{real[tuple(where)]} at {where} of the real tokens")
        if not self.ignored:
            return ()
        return (
            note(
                "bad-golden",
                f"names that a golden file does not define are ignored: {', '.join(self.ignored)}",
                file=self.source,
                tensors=self.ignored,
            ),
        )

    @property
    def hidden(self) -> dict[int, NDArray[np.float32]]:
        """hidden.i by i, in the order of layers."""
        found = {int(name[7:]): value for name, value in self.outputs.items() if name.startswith("hidden.")}
        return dict(sorted(found.items()))

    @property
    def longest(self) -> int:
        """Real tokens of the longest sequence."""
        return int(self.mask.sum(axis=1).max())


def _plain(source: str, name: str, tensor: Any) -> NDArray[Any]:
    if not isinstance(tensor, Tagged):
        return np.asarray(tensor)
    if tensor.tag != "BF16":
        _refuse(source, name, "float32", tensor.tag)
    return tensor.float32()


def _output(source: str, name: str, value: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    if name == "generated":
        if value.ndim != 2 or value.shape[0] != ids.shape[0] or value.dtype.kind not in "iu":
            _refuse(source, name, f"int64 [{ids.shape[0]}, steps]", _form(value))
        return value.astype(np.int64)
    if value.dtype.kind != "f":
        _refuse(source, name, "float32", _form(value))
    if name == "image_features":
        if value.ndim < 2:
            _refuse(source, name, "float32 [n, hidden]", _form(value))
        return value.reshape(-1, value.shape[-1]).astype(np.float32)
    if value.ndim == 4 and name.startswith(
        ("hidden.", "unnormed")
    ):  # several residual streams: behind one another, or one of equals
        same = (value == value[:, :, :1]).all()
        value = value[:, :, 0] if same else value.reshape(*value.shape[:2], -1)
    if value.ndim != 3 or value.shape[:2] != ids.shape:
        _refuse(source, name, f"float32 [{ids.shape[0]}, {ids.shape[1]}, width]", _form(value))
    return value.astype(np.float32, copy=False)


def _mask(source: str, mask: NDArray[Any] | None, ids: NDArray[Any]) -> NDArray[np.bool_]:
    if mask is None:
        return np.ones(ids.shape, dtype=bool)
    if mask.shape != ids.shape:
        _refuse(source, "attention_mask", str(list(ids.shape)), _form(mask))
    real = mask != 0
    if (other := mask[real & (mask != 1)]).size:
        _refuse(source, "attention_mask", "0 for padding and 1 for tokens", f"{other.flat[0]}")
    if not real.any(axis=1).all():
        _refuse(source, "attention_mask", "at least one token in every row", "a row of padding")
    if (np.diff(real.astype(np.int8), axis=1) != 0).sum(axis=1).max(initial=0) > 1:
        _refuse(source, "attention_mask", "padding on one side of a row, left or right", "padding between real tokens")
    return real


def _form(value: NDArray[Any]) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _refuse(source: str, name: str, expected: str, found: str) -> NoReturn:
    raise Refused(
        fatal(
            "bad-golden",
            f"the golden file cannot be used: {name}",
            file=source,
            tensors=(name,),
            expected=expected,
            found=found,
            next="write it again from the reference; README names the tensors of a golden file",
        )
    )
