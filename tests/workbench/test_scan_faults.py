"""Every way in which a download can be broken, from the command line: exit status, code, and words to act on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.weights.files.index import INDEX
from firstlight.workbench.cli import main
from tests.engine.weights.files import raw

Get = Callable[[str], Path]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5368709120\n"
HTML = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>"


def shards(home: Path) -> list[Path]:
    return sorted(home.glob("*.safetensors"))


def last(home: Path) -> Path:
    return shards(home)[-1]


def index(home: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((home / INDEX).read_text())
    change(value)
    (home / INDEX).write_text(json.dumps(value))


def header(home: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of the last shard and leaves its data as it is."""
    data = last(home).read_bytes()
    length = int.from_bytes(data[:8], "little")
    value = json.loads(data[8 : 8 + length])
    found = change(value)
    last(home).write_bytes(raw(found if isinstance(found, bytes) else value, data[8 + length :]))


def entries(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries in the order of their data."""
    return sorted((v for k, v in value.items() if k != "__metadata__"), key=lambda entry: entry["data_offsets"])


def config(home: Path, **fields: Any) -> None:
    value = {**json.loads((home / "config.json").read_text()), **fields}
    (home / "config.json").write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def replace(path: Path, one: str, other: str) -> None:
    path.write_text(path.read_text().replace(one, other))


def only(home: Path, **files: bytes) -> None:
    """Nothing but these files."""
    for path in list(home.iterdir()):
        path.unlink()
    for name, data in files.items():
        (home / name.replace("__", ".")).write_bytes(data)


def shift(value: dict[str, Any], by: int) -> None:
    first, second = entries(value)[:2]
    second["data_offsets"] = [offset + by for offset in second["data_offsets"]]
    assert first


# What is broken -> how, exit status, code, words that must be said.
def _differing_copy(home: Path) -> None:
    """The last shard again, under a name of the same series, with one bit changed; the index still names the first."""
    data = bytearray(last(home).read_bytes())
    data[-1] ^= 1
    number = last(home).name.replace("model-", "model-9")
    (home / number).write_bytes(data)


FAULTS: Mapping[str, tuple[Callable[[Path], Any], int, str, str]] = {
    "a shard is missing": (lambda h: last(h).unlink(), 1, "missing-shard", "is not there, which holds"),
    "a download goes on": (
        lambda h: last(h).rename(f"{last(h)}.part"), 1, "missing-shard", "an unfinished download"
    ),
    "a shard is cut": (
        lambda h: os.truncate(last(h), last(h).stat().st_size - 4096), 1, "truncated-shard", "its last 4,096 bytes"
    ),
    "a shard is cut in its header": (lambda h: os.truncate(last(h), 99), 1, "truncated-shard", "within its header"),
    "a shard is longer": (
        lambda h: last(h).write_bytes(last(h).read_bytes() + b"12345"), 1, "trailing-bytes", "5 bytes that no tensor"
    ),
    "a shard is empty": (lambda h: last(h).write_bytes(b""), 1, "not-safetensors", "an empty file"),
    "a shard is a pointer": (lambda h: last(h).write_bytes(LFS), 1, "not-safetensors", "Git LFS pointer"),
    "a shard is a page": (lambda h: last(h).write_bytes(HTML), 1, "not-safetensors", "a web page"),
    "a shard is a pickle": (
        lambda h: last(h).write_bytes(b"PK\x03\x04" + bytes(99)), 1, "not-safetensors", "a zip archive"
    ),
    "a header claims a terabyte": (
        lambda h: last(h).write_bytes((1 << 40).to_bytes(8, "little") + b"{"), 1, "header-too-large", "1,048,576 MiB"
    ),
    "a header with zeros in it": (
        lambda h: last(h).write_bytes(raw(b'{"a":' + bytes(99), length=104)), 1, "header-invalid", "a zero byte"
    ),
    "tensors overlap": (lambda h: header(h, lambda v: shift(v, -4)), 1, "header-invalid", "overlaps"),
    "a gap between tensors": (lambda h: header(h, lambda v: shift(v, 4)), 1, "header-invalid", "leaves a gap"),
    "an offset below zero": (
        lambda h: header(h, lambda v: entries(v)[0].update(data_offsets=[-4, 4])), 1, "header-invalid", ">= 0"
    ),
    "an offset beyond all files": (
        lambda h: header(h, lambda v: entries(v)[-1].update(data_offsets=[2**62, 2**62 + 4])),
        1, "header-invalid", "length",
    ),
    "an unknown dtype": (lambda h: header(h, lambda v: entries(v)[0].update(dtype="F9")), 1, "header-invalid", "dtype"),
    "a shape that is text": (
        lambda h: header(h, lambda v: entries(v)[0].update(shape="8")), 1, "header-invalid", "Expected `array"
    ),
    "a name twice in a header": (
        lambda h: header(h, lambda v: json.dumps(v)[:-1].encode() + b"," + json.dumps(v)[1:].encode()),
        1, "header-invalid", "occurs twice",
    ),
    "a name that is half a character": (
        lambda h: header(h, lambda v: json.dumps({"\ud800": entries(v)[0]}).encode()), 1, "header-invalid", "not valid"
    ),
    "a header of no UTF-8": (
        lambda h: header(h, lambda v: json.dumps(v).encode().replace(b"model", b"mod\xffl")),
        1, "header-invalid", "is not valid",
    ),
    "metadata of another type": (
        lambda h: header(h, lambda v: v.update(__metadata__={"format": 5})), 0, "header-invalid", "not text by text"
    ),
    "the index lists a tensor that no header has": (
        lambda h: index(h, lambda v: v["weight_map"].update({"model.layers.7.x": last(h).name})),
        1, "stale-index", "its header does not have",
    ),
    "the index forgets a tensor": (
        lambda h: index(h, lambda v: v["weight_map"].pop("model.norm.weight")), 0, "unlisted-tensor", "unlisted"
    ),
    "the index places a tensor elsewhere": (
        lambda h: index(h, lambda v: v["weight_map"].update({"model.norm.weight": shards(h)[0].name})),
        0, "stale-index", "headers are the truth",
    ),
    "the index lists a tensor twice": (
        lambda h: (h / INDEX).write_text((h / INDEX).read_text().replace('_map": {', '_map": {"lm_head.weight": "x",')),
        1, "stale-index", "twice",
    ),
    "the index has no map": (lambda h: (h / INDEX).write_text('{"weight_map": 7}'), 2, "stale-index", "weight_map"),
    "the index leads out": (
        lambda h: index(h, lambda v: v["weight_map"].update({"a": "../../etc/passwd"})), 2, "unsafe-file", "outside"
    ),
    "the index names pickles": (
        lambda h: index(h, lambda v: v["weight_map"].update({"a": "pytorch_model.bin"})), 1, "unsafe-file", "pickled"
    ),
    "a second copy beside the shards": (
        lambda h: shutil.copy(last(h), h / "consolidated.safetensors"), 0, "shadowed-file", "what is read is model-"
    ),
    "a link that dangles": (
        lambda h: [(name := last(h)).unlink(), name.symlink_to("../blobs/0123")], 1, "missing-shard", "../blobs/0123"
    ),
    "a folder called like a shard": (
        lambda h: [(name := last(h)).unlink(), name.mkdir()], 1, "not-safetensors", "a directory"
    ),
    "an index of many shards that are not there": (
        lambda h: [path.unlink() for path in shards(h)], 1, "missing-shard", "is not there"
    ),
    "a name in capital letters": (
        lambda h: header(h, lambda v: v.update({k.upper(): v.pop(k) for k in list(v) if k == "model.norm.weight"})),
        1, "unconsumed-tensor", "MODEL.NORM.WEIGHT",
    ),
    "layers that are not there": (lambda h: config(h, num_hidden_layers=9), 1, "missing-tensor", "up to number 2"),
    "another vocabulary": (lambda h: config(h, vocab_size=99), 1, "shape-mismatch", "99"),
    "an unknown architecture": (lambda h: config(h, model_type="lama"), 1, "unknown-architecture", "llama"),
    "a key with two values": (
        lambda h: (h / "config.json").write_text((h / "config.json").read_text().replace("{", '{"vocab_size": 5,', 1)),
        1, "conflicting-flag", "twice with different values",
    ),
    "a configuration of a wrong type": (lambda h: config(h, hidden_size="big"), 1, "config-invalid", "hidden_size"),
    "no configuration": (lambda h: (h / "config.json").unlink(), 2, "missing-side-file", "has no config.json"),
    "a configuration that is a page": (
        lambda h: (h / "config.json").write_bytes(HTML), 2, "side-file-invalid", "not JSON"
    ),
    "a configuration of a terabyte": (
        lambda h: os.truncate(h / "config.json", 1 << 40), 2, "side-file-invalid", "at most"
    ),
    "only pickles": (
        lambda h: only(h, config__json=b"{}", pytorch_model__bin=b"PK"), 2, "missing-shard", "pickled weights"
    ),
    "only GGUF": (lambda h: only(h, model__gguf=b"GGUF\x03"), 2, "missing-shard", "GGUF"),
    "equal copies that the index does not settle": (
        lambda h: [shutil.copy(shards(h)[0], h / "more-00001-of-00001.safetensors"), (h / INDEX).unlink()],
        0, "duplicate-tensor", "equal copies; the first is used",
    ),
    "copies that differ, without an index": (
        lambda h: [_differing_copy(h), (h / INDEX).unlink()], 1, "duplicate-tensor", "not guessed"
    ),
    "attributes of files that macOS copied": (
        lambda h: [(h / f"._{path.name}").write_bytes(b"\0\5\x16\7") for path in shards(h)], 0, "shadowed-file", "macOS"
    ),
    "a sum that is no number": (
        lambda h: index(h, lambda v: v["metadata"].update(total_size=math.nan)), 0, "missing-side-file", "tokenizer"
    ),
    "an index that is a dangling link": (
        lambda h: [(h / INDEX).unlink(), (h / INDEX).symlink_to("blob")], 2, "missing-side-file", "a link to blob"
    ),
    "a flag in quotes": (lambda h: config(h, tie_word_embeddings="false"), 1, "config-invalid", "without quotes"),
    "a class of another architecture": (
        lambda h: config(h, architectures=["MixtralForCausalLM"]), 0, "conflicting-flag", "which is mixtral"
    ),
    "a size beyond all numbers": (
        lambda h: [config(h, rms_norm_eps=7e77), replace(h / "config.json", "7e+77", "1e999")],
        1, "config-invalid", "rms_norm_eps has an impossible value",
    ),
    "copies that differ, of which the index names one": (
        _differing_copy, 0, "duplicate-tensor", "two that differ; the index"
    ),
    "an index of nothing": (
        lambda h: index(h, lambda v: v["weight_map"].clear()), 2, "stale-index", "no usable weight_map"
    ),
    "a shard in capital letters": (
        lambda h: last(h).rename(h / last(h).name.replace("model", "MODEL")), 1, "missing-shard", "spelt otherwise"
    ),
    "a configuration with a byte order mark": (
        lambda h: (h / "config.json").write_bytes(b"\xef\xbb\xbf" + (h / "config.json").read_bytes()),
        2, "side-file-invalid", "byte order mark",
    ),
    "an adapter alone": (
        lambda h: [[path.unlink() for path in (*shards(h), h / INDEX)], (h / "adapter_model.safetensors").touch()],
        2, "missing-shard", "adapter (LoRA or the like)",
    ),
    "an adapter without a configuration": (
        lambda h: only(h, adapter_config__json=b"{}", adapter_model__safetensors=b""), 2, "missing-shard", "merge"
    ),
    "an adapter beside the model": (
        lambda h: shutil.copy(last(h), h / "adapter_model.safetensors"), 0, "shadowed-file", "is not applied"
    ),
    "an end that no answer has": (
        lambda h: (h / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}'),
        0, "conflicting-flag", "no answer ends at that",
    ),
    "a template that is no Jinja": (
        lambda h: (h / "chat_template.jinja").write_text("{% for message in messages %}{{ message"),
        0, "side-file-invalid", "not valid Jinja",
    ),
    "words of MLX": (
        lambda h: config(h, quantization_config={"group_size": 64, "bits": 4}), 1, "unsupported-format", "Apple's MLX"
    ),
    "an entry of a header that cannot be": (
        lambda h: header(h, lambda v: v["model.norm.weight"].update(data_offsets=[0, 1, 2])),
        1, "header-invalid", "of length 2, got 3",
    ),
    "weights in a folder": (
        lambda h: [(h / "w").mkdir(), (h / INDEX).unlink(), [path.rename(h / "w" / path.name) for path in shards(h)]],
        2, "missing-shard", "put config.json beside model-00001",
    ),
    "a file that the index maps to nothing": (
        lambda h: index(h, lambda v: v["weight_map"].update({"model.x": None})), 2, "stale-index", "model.x: null"
    ),
    "an architecture that is no name": (
        lambda h: config(h, model_type=["llama"]), 1, "config-invalid", "model_type has an impossible value"
    ),
    "an architecture in other letters": (
        lambda h: config(h, model_type="LLaMA"), 1, "unknown-architecture", "nearest names: llama"
    ),
    "a dtype that nothing computes in": (
        lambda h: config(h, dtype="float8_e4m3fn"), 0, "config-invalid", "is no dtype that is computed in"
    ),
    "layers whose numbers have zeros before them": (
        lambda h: header(h, lambda v: v.update({k.replace("rs.2.", "rs.002."): v.pop(k) for k in list(v)})),
        1, "unconsumed-tensor", "model.layers.002.",
    ),
    "a shard that was never written": (
        lambda h: last(h).write_bytes(bytes(999)), 1, "not-safetensors", "it was never written"
    ),
    "a shard of words": (
        lambda h: last(h).write_text("Access to this model is restricted."), 1, "not-safetensors", "'Access to this m'"
    ),
    "a link behind a link": (
        lambda h: [
            (h / "in").symlink_to(shutil.copytree(h, h.parent / "out")), last(h).unlink(),
            (h / "model-00002-of-00002.safetensors").symlink_to(f"in/{last(h.parent / 'out').name}"),
        ],
        0, "unsafe-file", "out of the directory",
    ),
    "a configuration from elsewhere": (
        lambda h: (h / "config.json").symlink_to((h / "config.json").rename(h.parent / "config.json")),
        0, "unsafe-file", "config.json ->",
    ),
    "a tokenizer that is a pipe": (lambda h: os.mkfifo(h / "tokenizer.json"), 0, "missing-side-file", "a pipe"),
    "a rotary base in two older places": (
        lambda h: config(h, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "default", "rope_theta": 5e5}),
        0, "conflicting-flag", "rope_theta and rope_scaling.rope_theta disagree; rope_scaling is used",
    ),
    "nothing": (only, 2, "missing-side-file", "an empty directory"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said(fault: str, checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    act, status, code, words = FAULTS[fault]
    home = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    act(home)
    assert main(["scan", str(home)]) == status
    written = capsys.readouterr()
    said = " ".join((written.out + written.err).split())
    assert code in said
    assert words in said
    assert "next" in said
    assert "Traceback" not in said
