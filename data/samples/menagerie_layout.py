"""The architecture of menagerie, its tokenizer and its processor, and the checkpoint directory that holds them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from menagerie_questions import all_wordings
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIDE, PATCH = 64, 8
GRID = SIDE // PATCH
NUM_PATCHES = GRID * GRID
VOCABULARY = 733
PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, IMAGE = range(7)
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}{{- '<image>\\n' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def config() -> LlavaConfig:
    """The architecture: 4.0 million parameters, heads divisible by four, two KV heads, an untied head."""
    vision = CLIPVisionConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def train_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE over the wordings of questions.py; any text can be encoded, since all 256 bytes are tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_wordings(), trainer)
    return tokenizer


def processor_of(tokenizer: tokenizers.Tokenizer) -> LlavaProcessor:
    """What turns chats and pictures into model inputs; half means and deviations, unlike CLIP's own."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BEGIN],
        eos_token=SPECIALS[END],
        extra_special_tokens={"image_token": SPECIALS[IMAGE]},
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def write_checkpoint(model: LlavaForConditionalGeneration, directory: Path) -> None:
    """Writes configuration, weights in shards with an index, tokenizer, chat template and processor."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, do_sample=False, max_new_tokens=32
    )
    model.save_pretrained(directory, max_shard_size="2500KB")
    processor_of(train_tokenizer()).save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)
