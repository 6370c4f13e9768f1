"""Which tokenizer class transformers 5 would use, and which parts of tokenizer.json that class replaces.

Some classes of transformers 5 keep only the vocabulary, merges, added tokens and post-processor of tokenizer.json and
put a pipeline of their own around them. What a model was trained on is what the vendor's stack produces, so the same
replacement is made here, from the table below, and reported where it differs from the file.

Source: transformers 5.24, models/auto/tokenization_auto.py and the `tokenization_*.py` files of the classes named.
Not covered: classes that no decoder-only model here uses; their tokenizer.json is taken as it is, and said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

BACKEND = "TokenizersBackend"
BACKEND_NAMES = frozenset({BACKEND, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend"})

# A model type listed here is given this class by transformers where the checkpoint names none.
REGISTERED_TYPES: dict[str, tuple[str, ...]] = {
    "GPT2Tokenizer": (
        "blip-2", "codegen", "dbrx", "emu3", "gpt2", "gpt_neo", "gptj", "hyperclovax_vision_v2", "instructblip",
        "instructblipvideo", "jais2", "opt", "phi", "starcoder2",
    ),
    "Qwen2Tokenizer": (
        "audioflamingo3", "colqwen2", "cosmos3_omni", "dots3_note", "fun_asr_nano", "hunyuan_vl", "internvl",
        "moss_transcribe_diarize", "ovis2", "qianfan_ocr", "qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio",
        "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_asr", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl",
        "qwen3_vl_moe",
    ),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp"),
    "GemmaTokenizer": (
        "diffusion_gemma", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma",
        "shieldgemma2", "t5gemma", "zaya",
    ),
    "CohereTokenizer": ("aya_vision", "cohere", "cohere2"),
    "GPTNeoXTokenizer": (
        "falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt", "olmo", "olmoe", "rwkv", "xlstm",
    ),
    "LlamaTokenizer": ("idefics", "idefics2"),
    BACKEND: (
        "arctic", "aria", "chatlm", "ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "glm4v", "glm4v_moe", "got_ocr2", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid",
        "granitemoeshared", "h2ovl_chat", "hyperclovax", "hyperclovax_vlm", "internlm2", "internlm3", "iquestcoder",
        "jamba", "kimi_k25", "kimi_linear", "llava", "llava_next", "mimo_v2_flash", "minicpm3", "minicpmv",
        "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mistral_large4", "mixtral", "modernbert",
        "molmo", "molmo2", "nemotron", "nvfp4", "olmo2", "olmo3", "olmo_hybrid", "opencua", "openvla", "paddleocr_vl",
        "persimmon", "phi3", "phi3_v", "phimoe", "pixtral", "smolvlm", "stablelm", "step3_vl", "vipllava", "voxtral",
    ),
}  # fmt: skip

# Model types whose checkpoints are known to name a wrong class: the registered class wins.
OVERRULED_TYPES = frozenset(
    {"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"}
)

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer class puts around the vocabulary, in the notation of tokenizer.json.

    `model` holds the flags of the BPE model; `special` the special tokens a checkpoint need not name;
    `drop_post_processor` is set where the class writes its own, which adds nothing.
    """

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    model: Mapping[str, Any]
    special: Mapping[str, str]
    drop_post_processor: bool = False
    mark_all_special: bool = False


def _byte_level(add_prefix_space: bool = False, use_regex: bool = True) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_BYTE_DECODER = _byte_level(add_prefix_space=True)
_BYTE_MODEL: dict[str, Any] = {"fuse_unk": False, "byte_fallback": False, "unk_token": None, "ignore_merges": False}


def _gpt2(options: Mapping[str, Any]) -> Pipeline:
    return Pipeline(
        normalizer=None,
        pre_tokenizer=_byte_level(bool(options.get("add_prefix_space"))),
        decoder=_BYTE_DECODER,
        model=_BYTE_MODEL,
        special=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    )


def _gpt_neox(options: Mapping[str, Any]) -> Pipeline:
    return Pipeline(
        normalizer={"type": "NFC"},
        pre_tokenizer=_byte_level(bool(options.get("add_prefix_space"))),
        decoder=_BYTE_DECODER,
        model=_BYTE_MODEL,
        special={**dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"), "pad_token": "<|padding|>"},
        drop_post_processor=True,
    )


def _cohere(options: Mapping[str, Any]) -> Pipeline:
    digits = {"type": "Digits", "individual_digits": True}
    prefix = bool(options.get("add_prefix_space"))
    return Pipeline(
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, _byte_level(prefix)]},
        decoder=_byte_level(prefix),
        model=_BYTE_MODEL,
        special={
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
    )


def _qwen(pattern: str, mark_all_special: bool) -> Callable[[Mapping[str, Any]], Pipeline]:
    def build(options: Mapping[str, Any]) -> Pipeline:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = _byte_level(bool(options.get("add_prefix_space")), use_regex=False)
        return Pipeline(
            normalizer={"type": "NFC"},
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
            decoder=_BYTE_DECODER,
            model=_BYTE_MODEL,
            special=dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
            mark_all_special=mark_all_special,
        )

    return build


_REPLACE_AND_FALL_BACK: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def _llama(options: Mapping[str, Any]) -> Pipeline:
    prefix = options.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = ("always" if options.get("legacy") else "first") if prefix else "never"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return Pipeline(
        normalizer=None,
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        decoder={"type": "Sequence", "decoders": [*_REPLACE_AND_FALL_BACK, *strip]},
        model={"fuse_unk": True, "byte_fallback": True, "unk_token": None, "ignore_merges": False},
        special={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    )


def _gemma(options: Mapping[str, Any]) -> Pipeline:
    unk = str(options.get("unk_token") or "<unk>")
    return Pipeline(
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        decoder={"type": "Sequence", "decoders": _REPLACE_AND_FALL_BACK},
        model={"fuse_unk": True, "byte_fallback": True, "unk_token": unk, "ignore_merges": False},
        special={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    )


PIPELINES: Mapping[str, Callable[[Mapping[str, Any]], Pipeline]] = {
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "CohereTokenizer": _cohere,
    "Qwen2Tokenizer": _qwen(_QWEN2_SPLIT, mark_all_special=True),
    "Qwen3_5Tokenizer": _qwen(_QWEN3_5_SPLIT, mark_all_special=False),
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
}


def registered_class(model_type: str | None) -> str | None:
    """The tokenizer class that transformers registers for a model type, or None."""
    return next((name for name, types in REGISTERED_TYPES.items() if model_type in types), None)


def effective_class(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], is_byte_level: bool) -> str:
    """The tokenizer class that `AutoTokenizer.from_pretrained` would take.

    `is_byte_level`: whether tokenizer.json mentions ByteLevel, which a LlamaTokenizer cannot be.
    """
    model_type = config.get("model_type")
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    registered = registered_class(model_type)
    if named is None:
        return registered or BACKEND
    named = str(named).removesuffix("Fast") if named != "PreTrainedTokenizerFast" else str(named)
    if named == "LlamaTokenizer" and is_byte_level and model_type not in OVERRULED_TYPES:
        return BACKEND
    if registered is not None and registered != named:
        if registered == BACKEND:
            return BACKEND
        return registered if model_type in OVERRULED_TYPES else named
    return named
