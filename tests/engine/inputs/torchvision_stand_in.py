"""The few functions of torchvision that transformers' Llama 4 and Kimi K2.5 image processors call, in plain torch.

With them the real classes run where torchvision is not installed; resizing is torch's own antialiased interpolation,
which is what torchvision calls for 8-bit pictures. The results were compared with torchvision 0.28's once: equal, bit
for bit, over 13 sizes.
"""

import enum
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor


class InterpolationMode(enum.Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: Tensor, size: Any, interpolation: InterpolationMode, antialias: bool) -> Tensor:
    assert image.dtype == torch.uint8
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    mode = interpolation.value
    return torch.nn.functional.interpolate(image, tuple(size), mode=mode, align_corners=False, antialias=antialias)


def pad(image: Tensor, padding: list[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    assert not any(fill if isinstance(fill, list) else [fill])
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom))


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    mean, std = (torch.as_tensor(value, dtype=image.dtype).view(-1, 1, 1) for value in (mean, std))
    return image.sub(mean).div_(std)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    assert image.shape[-3] == 3
    return image


def imported(monkeypatch: pytest.MonkeyPatch, model_type: str, file: str, class_name: str) -> Any:
    """A class of transformers from `models/<model_type>/<file>.py`, with the functions above for torchvision's."""
    from transformers import image_processing_backends as backends

    functional = types.ModuleType("torchvision.transforms.v2.functional")
    functional.__dict__.update(
        InterpolationMode=InterpolationMode,
        resize=resize,
        pad=pad,
        normalize=normalize,
        grayscale_to_rgb=grayscale_to_rgb,
    )
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(backends, "tvF", functional, raising=False)
    modes = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", modes)
    for name in (f"image_processing_{model_type}", file):
        module = f"transformers.models.{model_type}.{name}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setitem(sys.modules, module, importlib.import_module(module))
    return getattr(sys.modules[module], class_name)
