"""Safetensors files made by hand, right and wrong, and tiny checkpoint directories of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.engine.weights.files.header import DTYPE_BITS

Entries = Mapping[str, Any]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def entry(dtype: str, shape: list[int], start: int) -> dict[str, Any]:
    """An entry that is right."""
    count = 1
    for size in shape:
        count *= size
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + count * DTYPE_BITS[dtype] // 8]}


def entries(shapes: Mapping[str, list[int]], dtype: str = "F32") -> dict[str, Any]:
    """Tensors back to back in the order given."""
    found: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        found[name] = entry(dtype, shape, start)
        start = found[name]["data_offsets"][1]
    return found


def raw(header: Entries | bytes, body: int | bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file: `header` as JSON or as it is, `body` as it is or so many bytes; `length` may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    filled = bytes(index % 251 for index in range(body)) if isinstance(body, int) else body
    return (len(text) if length is None else length).to_bytes(8, "little") + text + filled


def shard(path: Path, shapes: Mapping[str, list[int]], dtype: str = "F32") -> Path:
    """A file that is right."""
    header = entries(shapes, dtype)
    end = max((item["data_offsets"][1] for item in header.values()), default=0)
    path.write_bytes(raw(header, end))
    return path


def directory(
    home: Path, shards: Mapping[str, Mapping[str, list[int]]], index: Mapping[str, str] | bool = True
) -> Path:
    """A checkpoint directory: config.json, shards, and an index (True: a right one; False: none)."""
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(LLAMA))
    for file, shapes in shards.items():
        shard(home / file, shapes)
    if index is True:
        index = {tensor: file for file, shapes in shards.items() for tensor in shapes}
    if index is not False:
        write_index(home, index)
    return home


def write_index(home: Path, weight_map: Mapping[str, str], **more: Any) -> None:
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map), **more}))
