"""What a tiny model is, and the usual keys of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB = 131
IMAGE_TOKEN = VOCAB - 1


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny model: its raw configuration, the length of the prompts it is tried with, its pictures, and its files."""

    config: Mapping[str, Any]
    tokens: int = 24
    picture_tokens: int = 0
    shards: int = 1
    stored: torch.dtype = torch.float32
    fields: Mapping[str, Any] = field(default_factory=dict)  # set on the saved config.json; None removes a key


def llama(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}
