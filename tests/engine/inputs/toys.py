"""Toy tokenizers and processors, saved as transformers saves them."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from firstlight.engine.inputs.pictures import Picture, open_picture

CORPUS = (
    "What animal is this? A cat, a dog, two owls and 3 foxes on a blue background. The cow says moo! It's a cat.",
    "def main():\n    return 42\n\n\n  indented\tby tabs   and many    spaces",
    "naïve café, Ελληνικά, Русский, 日本語のテキスト, 한국어, עברית, emoji 🫠🦊🐱 and flags 🇩🇪",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")


def picture_of(image: Image.Image) -> Picture:
    """A picture of the file that an image is kept in without a loss."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return open_picture(file.getvalue())


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 32},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
}


def byte_level_backend(bos: bool = False) -> Any:
    """A byte-level BPE tokenizer trained on the corpus; `bos`: its post-processor begins every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    if bos:
        end = backend.token_to_id("<|endoftext|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
        )
    return backend


def metaspace_backend() -> Any:
    """A tokenizer of the SentencePiece kind: marks for spaces, single bytes for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(CORPUS[:2], trainer)
    # Byte tokens belong to the model, not to the added tokens.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(backend: Any, directory: Path, class_name: str, **options: Any) -> Path:
    """tokenizer.json and tokenizer_config.json as a release has them."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": class_name, **options}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def make_toys(root: Path) -> None:
    """text/ (byte-level, text only), bos/ (begins texts), spm/ (Metaspace), vlm/ (LLaVA layout)."""
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    text = save_tokenizer(byte_level_backend(), root / "text", "PreTrainedTokenizerFast", **end)
    (text / "chat_template.jinja").write_text(TEXT_CHATML)
    write_json(text / "config.json", {"model_type": "llama", "eos_token_id": 2})
    bos = save_tokenizer(byte_level_backend(bos=True), root / "bos", "PreTrainedTokenizerFast", **end)
    write_json(bos / "config.json", {"model_type": "llama"})
    (bos / "chat_template.jinja").write_text(TEXT_CHATML)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    spm = save_tokenizer(metaspace_backend(), root / "spm", "LlamaTokenizer", **names)
    write_json(spm / "config.json", {"model_type": "llama"})
    vlm = save_tokenizer(byte_level_backend(), root / "vlm", "PreTrainedTokenizerFast", **end)
    (vlm / "chat_template.jinja").write_text(CHATML)
    write_json(vlm / "config.json", {"model_type": "llava", "vision_config": {"patch_size": 8}})
    write_json(
        vlm / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_processor": IMAGE_PROCESSOR,
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    )
