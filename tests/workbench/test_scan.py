"""Scan says what a checkpoint is, and finds every way in which one can be incomplete."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tensor, read, write
from firstlight.workbench.report import Report
from firstlight.workbench.scan import scan
from tests.checkpoints import edit_config

Get = Callable[[str], Path]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(checkpoint: Get, tmp_path: Path) -> Get:
    """A copy of a tiny checkpoint to be broken."""

    def get(name: str) -> Path:
        return Path(shutil.copytree(checkpoint(name), tmp_path / name))

    return get


def found(report: Report, code: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "failed"]


def shards(home: Path) -> list[Path]:
    return sorted(home.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gemma2", "llava-clip", "llava-siglip"])
def test_a_whole_checkpoint_passes_and_is_described(name: str, checkpoint: Get) -> None:
    home = checkpoint(name)
    report = scan(home)
    assert report.status == "passed", failed(report)
    opened = Checkpoint.open(home)
    assert report.value("tensors") == len(opened.tensors)
    assert report.value("checkpoint_bytes") == sum(t.nbytes for t in opened.tensors.values())
    formats = report.tables["formats"]
    assert sum(row["elements"] for row in formats) == sum(math.prod(t.shape) for t in opened.tensors.values())
    assert sum(row["count"] for row in report.tables["tensors"]) == len(opened.tensors)
    assert sum(row["total_bytes"] for row in report.tables["tensors"]) == report.value("checkpoint_bytes")
    assert {"linear", "attention", "sample"} <= {row["operator"] for row in report.tables["operators"]}
    towers = {row["tower"] for row in report.tables["layers"]}
    assert towers == ({"text", "vision"} if name.startswith("llava") else {"text"})


def test_blocks_are_named(checkpoint: Get) -> None:
    layers = scan(checkpoint("deepseek_v3")).tables["layers"]
    assert [row["layers"] for row in layers] == ["0", "1 to 2"]
    assert layers[1]["mixer"].startswith("MLA, 4 heads, latent 16+8")
    assert layers[1]["feed_forward"] == "MoE, 3 of 8 experts of 20, sigmoid, 2 of 4 groups, shared 40"
    mixer = scan(checkpoint("llama")).tables["layers"][0]["mixer"]
    assert mixer == "GQA, 4 query and 2 key/value heads of 8, rope 10,000"


def test_a_missing_shard_fails_at_once_and_names_what_it_held(copy: Get) -> None:
    home = copy("llama")
    lost = shards(home)[-1]
    names = {name for name, file in json.loads((home / INDEX).read_text())["weight_map"].items() if file == lost.name}
    lost.unlink()
    report = scan(home)
    finding = found(report, "missing-shard")
    assert (report.status, report.exit_status) == ("failed", 1)
    assert finding.file == lost.name
    assert set(finding.tensors) == names
    assert "every parameter is filled" in failed(report)


def test_a_truncated_shard_names_bytes_and_tensors(copy: Get) -> None:
    home = copy("llama")
    shard = shards(home)[-1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-4096])
    report = scan(home, deep=True)
    finding = found(report, "truncated-shard")
    assert finding.file == shard.name
    assert finding.expected == f"{len(data):,} bytes"
    assert finding.found == f"{len(data) - 4096:,} bytes"
    assert finding.tensors
    assert str(finding.next).startswith(f"fetch bytes {len(data) - 4096}-{len(data) - 1}")
    hashed = {row["name"] for row in report.tables["hashes"]}
    assert hashed == set(Checkpoint.open(home).tensors) - set(finding.tensors), "what is there is hashed"


def test_a_tensor_that_the_index_forgot_is_used_with_a_warning(copy: Get) -> None:
    home = copy("llama")
    index = json.loads((home / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (home / INDEX).write_text(json.dumps(index))
    report = scan(home)
    assert report.status == "passed"
    assert found(report, "unlisted-tensor").tensors == ("model.norm.weight",)


@pytest.mark.parametrize("content", [b"PK\x03\x04" + b"\0" * 64, (1 << 40).to_bytes(8, "little") + b"{"])
def test_a_file_of_another_kind_is_named(content: bytes, copy: Get) -> None:
    home = copy("llama")
    shards(home)[0].write_bytes(content)
    report = scan(home)
    assert report.status == "failed"
    assert {f.code for f in report.findings if f.severity == "fatal"} & {"not-safetensors", "header-too-large"}


def changed(home: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = read(home / "model.safetensors")
    change(tensors)
    write(home / "model.safetensors", tensors, {"format": "pt"})
    return home


def test_a_name_that_no_rule_knows_leaves_a_gap_on_both_sides(copy: Get) -> None:
    def misspell(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            old = f"model.layers.{layer}.mlp.up_proj.weight"
            tensors[old.replace("up_proj", "upp_proj")] = tensors.pop(old)

    report = scan(changed(copy("llama-tied"), misspell))
    assert report.status == "failed"
    assert failed(report) == ["every tensor is accounted for", "every parameter is filled"]
    assert "layers.{0..2}.mlp.upp_proj" in found(report, "unconsumed-tensor").message
    assert "layers.{0..2}.ffn.up.weight: 0 of 3 parameters filled" in found(report, "missing-tensor").message
    row = next(row for row in report.tables["tensors"] if "upp_proj" in row["name"])
    assert row["fills"] == "nothing"


def test_a_tie_is_noted_and_a_wrong_shape_fails(copy: Get) -> None:
    report = scan(copy("llama-tied"))
    assert found(report, "tied-head").severity == "note"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = np.ones(7, dtype=np.float32)

    report = scan(changed(copy("qwen3"), cut))
    assert "shapes and dtypes are as the model needs them" in failed(report)
    assert found(report, "shape-mismatch").found == "[7]"


def test_an_unknown_architecture_fails_but_tells_what_is_there(copy: Get) -> None:
    home = copy("llama")
    edit_config(home, model_type="lama")
    report = scan(home)
    assert (report.status, failed(report)) == ("failed", ["architecture is known"])
    assert "nearest names: llama" in str(found(report, "unknown-architecture").next)
    assert report.tables["tensors"]
    assert "fills" not in report.tables["tensors"][0]


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        scan(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"no \.safetensors file"):
        scan(tmp_path)
    with pytest.raises(Refused, match="not a checkpoint directory"):
        scan(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json", "tokenizer.json", "chat.jinja"])
@pytest.mark.parametrize("kind", ["a link that leads nowhere", "a directory", "a device, a pipe or a socket"])
def test_side_files_there_by_name_alone_are_told(checkpoint: Get, tmp_path: Path, name: str, kind: str) -> None:
    home = Path(shutil.copytree(checkpoint("llama-tied"), tmp_path / "model"))
    (home / name).unlink(missing_ok=True)
    make: dict[str, Callable[[], object]] = {
        "a link that leads nowhere": lambda: (home / name).symlink_to("../blobs/0123"),
        "a directory": (home / name).mkdir,
        "a device, a pipe or a socket": lambda: os.mkfifo(home / name),
    }
    make[kind]()
    (found,) = [finding for finding in scan(home).findings if finding.file == name]
    assert (found.code, found.severity, found.found) == ("side-file-invalid", "warning", kind)


def test_missing_side_files_are_warnings(checkpoint: Get) -> None:
    report = scan(checkpoint("llava-clip"))
    assert report.status == "passed"
    missing = {f.file for f in report.findings if f.code == "missing-side-file"}
    assert {"tokenizer.json", "chat template", "preprocessor_config.json"} <= missing
    assert {f.severity for f in report.findings if f.code == "missing-side-file"} <= {"warning", "note"}


def test_deep_hashes_every_tensor_and_finds_what_is_not_finite(copy: Get) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        weight = np.array(tensors["model.norm.weight"])
        weight[3], weight[5], weight[6] = np.nan, np.inf, -np.inf
        tensors["model.norm.weight"] = weight

    home = copy("llama-tied")
    clean = scan(home, deep=True)
    assert clean.status == "passed"
    opened = Checkpoint.open(home)
    hashes = {row["name"]: row["sha256"] for row in clean.tables["hashes"]}
    assert hashes == {name: hashlib.sha256(opened.read_bytes(name)).hexdigest() for name in opened.tensors}
    report = scan(changed(home, spoil), deep=True)
    assert failed(report) == ["every value is finite"]
    (check,) = [c for c in report.checks if c.status == "failed"]
    assert check.detail == "model.norm.weight (1 NaN, 2 infinite)"


def test_experts_whose_numbers_have_zeros_before_them_are_others(copy: Get) -> None:
    home = copy("qwen3_moe-bf16")

    def spell(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts.3." in name]:
            tensors[name.replace(".3.", ".003.")] = tensors.pop(name)

    report = scan(changed(home, spell))
    assert failed(report) == ["every tensor is accounted for", "every parameter is filled"]
    ways = {str(one.next) for one in report.findings if one.code == "missing-tensor"}
    assert any("perhaps model.layers.0.mlp.experts.003.up_proj.weight" in way for way in ways)


def test_a_key_that_cannot_be_fails_a_check(copy: Get) -> None:
    home = copy("qwen3_moe-bf16")
    edit_config(home, num_experts_per_tok=9)
    assert failed(scan(home)) == ["config.json agrees with itself"]


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        ({"crop_size": 336}, "the size of pictures is 336 x 336"),
        ({"crop_size": 12, "patch_size": 9, "image_std": [0.0, 0.5, 0.5]}, "image_std of preprocessor_config.json"),
    ],
)
def test_constants_that_pictures_cannot_have(constants: dict[str, Any], words: str, copy: Get) -> None:
    home = copy("llava-clip")
    stated = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (home / "preprocessor_config.json").write_text(json.dumps({**stated, "size": {"shortest_edge": 12}, **constants}))
    assert any(words in finding.message for finding in scan(home).findings)
