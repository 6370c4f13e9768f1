"""The image processor classes whose steps are known, by transformers' names. A new one is one line here."""

from __future__ import annotations

from collections.abc import Mapping

from firstlight.engine.inputs.image_kinds.anyres import LLAVA_NEXT
from firstlight.engine.inputs.image_kinds.crops import GEMMA3
from firstlight.engine.inputs.image_kinds.kimi_k3 import KIMI_K3
from firstlight.engine.inputs.image_kinds.kind import ImageKind
from firstlight.engine.inputs.image_kinds.patches import GLM4V, KIMI_K25, KIMI_VL, MINIMAX_M3, QWEN2_VL
from firstlight.engine.inputs.image_kinds.ragged import PIXTRAL
from firstlight.engine.inputs.image_kinds.single import BLIP, CLIP, LLAVA, SIGLIP, VIT
from firstlight.engine.inputs.image_kinds.splits import IDEFICS3
from firstlight.engine.inputs.image_kinds.tiles import GOT_OCR2, LLAMA4

IMAGE_KINDS: Mapping[str, ImageKind] = {
    "CLIPImageProcessor": CLIP,
    "LlavaImageProcessor": LLAVA,
    "SiglipImageProcessor": SIGLIP,
    "ViTImageProcessor": VIT,
    "BlipImageProcessor": BLIP,
    "LlavaNextImageProcessor": LLAVA_NEXT,
    "Qwen2VLImageProcessor": QWEN2_VL,
    "Glm4vImageProcessor": GLM4V,
    "Glm46VImageProcessor": GLM4V,
    "PixtralImageProcessor": PIXTRAL,
    "Gemma3ImageProcessor": GEMMA3,
    "GotOcr2ImageProcessor": GOT_OCR2,
    "Llama4ImageProcessor": LLAMA4,
    "Idefics3ImageProcessor": IDEFICS3,
    "SmolVLMImageProcessor": IDEFICS3,
    "Kimi_K25ImageProcessor": KIMI_K25,
    "KimiVLImageProcessor": KIMI_VL,
    "MiniMaxM3VLImageProcessor": MINIMAX_M3,
    "KimiK3VisionProcessor": KIMI_K3,
}

# Classes that come with a release's own code and do what a class of the table does.
ALIASES: Mapping[str, str] = {
    "KimiK25VisionProcessor": "Kimi_K25ImageProcessor",
}

# The class that transformers takes by model type where no file names one.
CLASS_OF_MODEL_TYPE: Mapping[str, str] = {
    "llava": "LlavaImageProcessor",
    "vipllava": "CLIPImageProcessor",
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "paligemma": "SiglipImageProcessor",
    "vit": "ViTImageProcessor",
    "blip": "BlipImageProcessor",
    "llava_next": "LlavaNextImageProcessor",
    "qwen2_vl": "Qwen2VLImageProcessor",
    "qwen2_5_vl": "Qwen2VLImageProcessor",
    "qwen3_vl": "Qwen2VLImageProcessor",
    "qwen3_5": "Qwen2VLImageProcessor",
    "qwen3_5_moe": "Qwen2VLImageProcessor",
    "glm4v": "Glm4vImageProcessor",
    "glm46v": "Glm46VImageProcessor",
    "pixtral": "PixtralImageProcessor",
    "mistral3": "PixtralImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "got_ocr2": "GotOcr2ImageProcessor",
    "internvl": "GotOcr2ImageProcessor",
    "llama4": "Llama4ImageProcessor",
    "idefics3": "Idefics3ImageProcessor",
    "smolvlm": "SmolVLMImageProcessor",
    "kimi_k25": "Kimi_K25ImageProcessor",
    "kimi_k3": "KimiK3VisionProcessor",
    "minimax_m3_vl": "MiniMaxM3VLImageProcessor",
}


def kind_of(class_name: str) -> tuple[str, ImageKind] | None:
    """A class by any of its names (Fast, Pil, aliases) with its own name, or None where its steps are not known."""
    base = class_name.removesuffix("Fast").removesuffix("Pil")
    base = ALIASES.get(base, base)
    return (base, IMAGE_KINDS[base]) if base in IMAGE_KINDS else None
