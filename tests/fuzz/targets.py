"""What is fuzzed: bytes of a file go in, and either a result comes out that keeps its promises, or `Refused`.

Anything else, an exception of another kind above all, is a fault. Each target has a folder of `corpus`, and `SEEDS` for
a start; `python -m tests.fuzz TARGET` searches for more, `test_corpus.py` runs what was found.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.inputs.expansions import CLASS_OF_MODEL_TYPE as PROCESSOR_CLASSES
from firstlight.engine.inputs.image_kinds.registry import CLASS_OF_MODEL_TYPE as IMAGE_CLASSES
from firstlight.engine.inputs.image_kinds.registry import IMAGE_KINDS
from firstlight.engine.inputs.pictures import open_picture
from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.inputs.side_files import (
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TOKENIZER_CONFIG,
)
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.accounts.said import MODELOPT
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import read_header, read_text
from firstlight.engine.weights.files.index import INDEX
from firstlight.engine.weights.files.lines import Vocabulary
from firstlight.engine.weights.files.shard_columns import columns_of
from firstlight.engine.weights.files.weight_map import read_weight_map
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.names.stock import stock
from firstlight.engine.weights.names.table import infos_of
from firstlight.workbench.agreement import disagreements
from firstlight.workbench.contradictions import contradictions, embedding_rows
from firstlight.workbench.manifest import Entry, Manifest, differences
from tests.engine.inputs.toys import TEXT_CHATML, make_toys
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
        columns = columns_of(read_text(path), Vocabulary())
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


def _write(place: Path, names: Sequence[str], data: bytes) -> None:
    """Several files in one: parts divided by a zero byte; a file whose part is empty is absent."""
    parts = data.split(b"\0", len(names) - 1)
    for name, part in zip_longest(names, parts, fillvalue=b""):
        (place / str(name)).unlink(missing_ok=True)
        if part:
            (place / str(name)).write_bytes(bytes(part))


def tokenizer(data: bytes) -> None:
    """Side files as a scan reads them: each disagreement is a finding."""
    place = home("tokenizer")
    _write(place, ("tokenizer.json", "generation_config.json", "processor_config.json"), data)
    _complete(disagreements(place, VISION, 32))


def prompts(data: bytes) -> None:
    """The files beside a sound tokenizer.json: a prompt is written and encoded, or refused."""
    place = inputs_home("prompts")
    _write(place, ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", GENERATION_CONFIG), data)
    _complete(disagreements(place, VISION, 420))
    try:
        processor = Processor.open(place)
        _complete(processor.prepare("a cat", chat=True).record.findings)
    except Refused as refused:
        _complete(refused.findings)


def _png(size: tuple[int, int]) -> bytes:
    stream = BytesIO()
    Image.new("RGB", size, (9, 99, 199)).save(stream, "PNG")
    return stream.getvalue()


def pictures(data: bytes) -> None:
    """A processor's files: two pictures become pixels and placeholders, as many as the prompt has features, or not."""
    place = inputs_home("pictures")
    _write(place, (PROCESSOR_CONFIG, PREPROCESSOR_CONFIG), data)
    _complete(disagreements(place, VISION, 420))
    images = [open_picture(_png(size)) for size in ((40, 24), (7, 31))]
    try:
        processor = Processor.open(place)
        _complete(processor.image_processor.constants.findings)
        prepared = processor.prepare("<image> and <image>".replace("<image>", processor.expansion.token), images)
        _complete(prepared.record.findings)
        assert len(prepared.picture_spans) == len(images)
    except Refused as refused:
        _complete(refused.findings)


def quantization(data: bytes) -> None:
    """How weights are stored, by `quantization_config` and ModelOpt's file: a complete account, or what it lacks."""
    place = home("quantization")
    text, _, beside = data.partition(b"\0")
    quoted = b'{"quantization_config": ' + (text or b"null") + b", " + _text(LLAMA)[1:]
    (place / "config.json").write_bytes(quoted)
    _write(place, (MODELOPT,), beside)
    try:
        found = Checkpoint.open(place)
        _complete(account(found, *FAMILIES.describe(found.config)).findings)
    except Refused as refused:
        _complete(refused.findings)


def manifest(data: bytes) -> None:
    """A manifest: it is held against another, both ways, or refused."""
    path = home("manifest") / "manifest"
    path.write_bytes(data)
    try:
        other = Manifest.read(path)
    except Refused as refused:
        _complete(refused.findings)
        return
    assert not list(differences(other, other))
    _complete([*differences(OTHER, other), *differences(other, OTHER)])


@cache
def inputs_home(target: str) -> Path:
    """A directory with a sound tokenizer, a chat template and a processor, of a target's own."""
    place = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    make_toys(place)
    if target == "prompts":
        (place / "vlm" / "chat_template.jinja").unlink()  # the one in tokenizer_config.json counts
    if target == "pictures":
        path = place / "vlm" / TOKENIZER_CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **TOKENS}))
    return place / "vlm"


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
    "prompts": prompts,
    "pictures": pictures,
    "quantization": quantization,
    "manifest": manifest,
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
MARKED = {"content": "<|im_end|>", "special": True, "lstrip": False}
PROMPTS: tuple[tuple[Any, ...], ...] = (
    (
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {"420": MARKED},
            "eos_token": MARKED,
            "chat_template": TEXT_CHATML,
        },
        {"bos_token": "<|endoftext|>", "image_token": "<image>"},
        {"<new>": 421},
        {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "suppress_tokens": [4]},
    ),
    ({"tokenizer_class": "Qwen2Tokenizer", "chat_template": [{"name": "default", "template": "{{ messages }}"}]},),
    ({"tokenizer_class": "LlamaTokenizer", "additional_special_tokens": ["<a>", MARKED], "legacy": False},),
)
TOKENS = {  # what processor classes look up in a tokenizer, and write for a picture
    **dict.fromkeys(("boi_token", "eoi_token", "start_image_token", "end_image_token"), "<boi>"),
    **dict.fromkeys(("image_token", "context_image_token"), "<image>"),
    "extra_special_tokens": [
        "<|image_pad|>",
        "<|media_pad|>",
        "[IMG]",
        "[IMG_BREAK]",
        "<|image|>",
        "<|patch|>",
        "<boi>",
    ],
}


def _processor(name: str, image_class: str) -> bytes:
    """The processor of a class with the defaults of its image processor, on which nothing is silent."""
    defaults = {key: value for key, value in IMAGE_KINDS[image_class].defaults.items() if value is not None}
    counts = {"patch_size": 8, "image_seq_length": 4, "image_seq_len": 4, "num_additional_image_tokens": 1}
    fields = {"processor_class": name, "vision_feature_select_strategy": "default", **counts}
    images = {"image_processor_type": image_class, **defaults}
    return bytes(msgspec.json.encode({**fields, "image_processor": images}))


PROCESSORS = {name: IMAGE_CLASSES[kind] for kind, name in PROCESSOR_CLASSES.items() if kind in IMAGE_CLASSES}
QUANTIZATIONS: tuple[Any, ...] = (
    {"quant_method": "fp8", "weight_block_size": [4, 4], "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "awq", "bits": 4, "group_size": 4, "zero_point": True, "version": "gemm"},
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "sym": True,
        "dynamic": {"-:.*up.*": {}, "+:.*q": {"bits": 8}},
    },
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*down.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 4, "symmetric": True},
            }
        },
    },
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head*"]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
)
OTHER = Manifest(
    name="other",
    tensors={
        "a.weight": Entry("F32", (2, 3), "0" * 64),
        "b.weight": Entry("BF16", (), "1" * 64),
    },
    files={"config.json": "2" * 64},
)
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
    "prompts": tuple(b"\0".join(map(_text, parts)) for parts in PROMPTS),
    "pictures": tuple(_processor(name, image_class) for name, image_class in PROCESSORS.items()),
    "quantization": tuple(map(_text, QUANTIZATIONS)),
    "manifest": (
        bytes(msgspec.json.encode(OTHER)),
        bytes(msgspec.json.encode(Manifest(name="", tensors={}, files={}))),
    ),
}
