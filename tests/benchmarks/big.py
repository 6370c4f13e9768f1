"""A checkpoint as large as one wants: a Llama in bfloat16, in shards, with as many layers as fit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from tests.benchmarks.common import ROOT

HEADS, KV_HEADS, VOCABULARY = 16, 8, 32000
SHARD_BYTES = 1 << 30


def shapes(layers: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names as in a release, in order; the feed-forward is four times as wide as `hidden`."""
    kv, width = hidden // HEADS * KV_HEADS, 4 * hidden
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (width, hidden)
        yield f"{prefix}mlp.up_proj.weight", (width, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def config(layers: int, hidden: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def layers_for(nbytes: int, hidden: int) -> int:
    """Layers of a checkpoint of about `nbytes`."""
    ends = sum(2 * math.prod(shape) for _, shape in shapes(0, hidden))
    one = sum(2 * math.prod(shape) for _, shape in shapes(1, hidden)) - ends
    return max(1, round((nbytes - ends) / one))


@contextmanager
def big_checkpoint(nbytes: int, hidden: int = 2048) -> Iterator[Path]:
    """The directory of one, deleted afterwards; small random numbers, none of them special."""
    import torch

    directory = ROOT / "build" / "bench" / f"llama-{nbytes // 1_000_000}m-{os.getpid()}"
    directory.mkdir(parents=True)
    try:
        noise = (torch.randn(16 << 20, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
        block = noise.view(torch.uint8).numpy().data
        layers = layers_for(nbytes, hidden)
        (directory / "config.json").write_text(json.dumps(config(layers, hidden)))
        shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
        size = 0
        for name, shape in shapes(layers, hidden):
            if size > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append((name, shape))
            size += 2 * math.prod(shape)
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {name: file for name, _ in tensors}
            _write(directory / file, tensors, block)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        os.sync()
        yield directory
    finally:
        rmtree(directory)


def _write(path: Path, tensors: list[tuple[str, tuple[int, ...]]], block: memoryview) -> None:
    entries, end = {}, 0
    for name, shape in tensors:
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        while end:
            end -= stream.write(block[: min(end, block.nbytes)])
