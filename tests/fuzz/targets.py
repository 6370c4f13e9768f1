"""What is fuzzed: bytes of a file go in, and either a result comes out that keeps its promises, or `Refused`.

Anything else, an exception of another kind above all, is a fault. Each target has a folder of `corpus`, and `SEEDS` for
a start; `python -m tests.fuzz TARGET` searches for more, `test_corpus.py` runs what was found.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import read_header, read_text
from firstlight.engine.weights.files.index import INDEX
from firstlight.engine.weights.files.shard_columns import columns_of
from firstlight.engine.weights.files.weight_map import read_weight_map
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.names.stock import stock
from firstlight.engine.weights.names.table import infos_of
from firstlight.workbench.agreement import disagreements
from firstlight.workbench.contradictions import contradictions, embedding_rows
from tests.engine.weights.files import LLAMA, directory, entries, entry, raw

CORPUS = Path(__file__).parent / "corpus"
SHARD = "model.safetensors"
SHAPES = {"model.embed_tokens.weight": [32, 8], "model.layers.0.mlp.up_proj.weight": [12, 8], "lm_head.weight": [32, 8]}


@cache
def home(target: str) -> Path:
    """A small checkpoint of a target's own, in which one file is replaced again and again."""
    place = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return directory(place / "model", {SHARD: SHAPES}, index=False)


def _complete(findings: tuple[Finding, ...] | list[Finding]) -> None:
    """A finding is something that a person can read and act on."""
    for finding in findings:
        assert finding.message
        assert str(finding).isprintable() or "\n" in str(finding)
        str(finding).encode()  # no halves of characters
        assert finding.severity == "note" or finding.next, finding


def header(data: bytes) -> None:
    """A shard: what is read without a fatal finding lies inside the file, each byte once; columns say the same."""
    path = home("header") / SHARD
    path.write_bytes(data)
    columns = None
    try:
        columns = columns_of(read_text(path))
        found = read_header(path)
    except Refused as refused:
        assert columns is None
        _complete(refused.findings)
        return
    _complete(found.findings)
    if columns is not None:
        assert (infos_of(columns), columns.findings) == (found.tensors, found.findings)
    if any(finding.severity == "fatal" for finding in found.findings):
        return
    length = int.from_bytes(data[:8], "little")
    assert 8 + length + sum(tensor.nbytes for tensor in found.tensors) == len(data)
    end = 8 + length
    for tensor in sorted(found.tensors, key=lambda tensor: (tensor.offset_bytes, tensor.nbytes)):
        assert tensor.offset_bytes == end, tensor
        end += tensor.nbytes


def index(data: bytes) -> None:
    """An index beside one shard: no tensor of it is lost, whatever the index says; columns say the same."""
    place = home("index")
    (place / INDEX).write_bytes(data)
    columns = read_weight_map(data)
    try:
        found = Checkpoint.open(place)
    except Refused as refused:
        _complete(refused.findings)
        return
    if columns is not None:
        listed = json.loads(data)
        assert listed.pop("weight_map") == dict(columns[0])
        assert json.loads(columns[1]) == {"weight_map": {}, **listed}
    _complete(found.findings)
    if SHARD in found.shards:
        assert set(found.tensors) == set(SHAPES)


def config(data: bytes) -> None:
    """A config.json: it is described, accounted for and held against the rest, or refused."""
    place = home("config")
    (place / "config.json").write_bytes(data)
    try:
        found = Checkpoint.open(place)
        kinds = stock(found.tensors)
        _complete(list(contradictions(found.config, kinds, True)))
        _complete(disagreements(place, found.config, embedding_rows(kinds)))
        spec, matcher = FAMILIES.describe(found.config)
        _complete(spec.findings)
        if spec.num_layers < 20:
            _complete(account(found, spec, matcher).findings)
    except Refused as refused:
        _complete(refused.findings)


def tokenizer(data: bytes) -> None:
    """Side files, three in one: tokenizer.json, generation_config.json and processor_config.json, by a zero byte."""
    place = home("tokenizer")
    names = ("tokenizer.json", "generation_config.json", "processor_config.json")
    for name, part in zip(names, data.split(b"\0", 2), strict=False):
        (place / name).write_bytes(part)
    _complete(disagreements(place, VISION, 32))


VISION: dict[str, Any] = {
    **LLAMA,
    "image_token_id": 5,
    "eos_token_id": [2, 3],
    "vision_config": {"image_size": 12, "patch_size": 4},
}
TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "index": index,
    "config": config,
    "tokenizer": tokenizer,
}


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _tokenizer_files(tokens: int) -> bytes:
    vocab = {f"t{number}": number for number in range(tokens)}
    added = [{"id": tokens, "content": "<image>"}]
    parts = (
        {"model": {"vocab": vocab}, "added_tokens": added},
        {"eos_token_id": 2},
        {"image_token": "<image>", "image_processor": {"size": {"height": 12, "width": 12}}},
    )
    return b"\0".join(map(_text, parts))


MOE = {**LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 4}
SEEDS: Mapping[str, tuple[bytes, ...]] = {
    "header": (
        raw(entries({"a": [2, 3], "b": []}), 28),
        raw({"__metadata__": {"format": "pt"}, **entries({"a.0.w": [2]}, "BF16")}, 4),
        raw({"a": entry("F4", [4], 0), "b": entry("F8_E8M0", [0, 7], 2)}, 2),
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": [{}]}}, 8),
    ),
    "index": (
        _text({"metadata": {"total_size": 2432}, "weight_map": dict.fromkeys(SHAPES, SHARD)}),
        _text({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}),
        _text({"weight_map": {"lm_head.weight": "../model.safetensors", "a": "pytorch_model.bin"}}),
    ),
    "config": (
        _text(LLAMA),
        _text(MOE),
        _text({"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model"}}),
        _text({**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}),
        _text({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}),
    ),
    "tokenizer": (_tokenizer_files(5), _tokenizer_files(40)),
}
