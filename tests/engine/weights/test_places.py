"""Places that are no checkpoint: what is there in its place, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.weights.files import directory
from tests.engine.weights.opening import refused


def test_nothing_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent").code == "not-found"
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file").found == "a file"
    assert refused("~no-such-user/model").code == "not-found"
    assert refused("a\0b").code == "not-found"


def test_an_empty_directory(tmp_path: Path) -> None:
    finding = refused(tmp_path)
    assert finding.code == "missing-side-file"
    assert finding.found == "an empty directory"


def test_a_configuration_and_no_weights(tmp_path: Path) -> None:
    finding = refused(directory(tmp_path / "model", {}, index=False))
    assert finding.code == "missing-shard"
    assert finding.found == "no weights"


def test_only_pickles(tmp_path: Path) -> None:
    home = directory(tmp_path / "model", {}, index=False)
    (home / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    finding = refused(home)
    assert finding.code == "missing-shard"
    assert finding.found == "pytorch_model.bin"
    assert "pickled weights are not read" in str(finding.next)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("tf_model.h5", "TensorFlow"),
        ("model.safetensors.part", "unfinished downloads: model.safetensors.part"),
        ("Model.SafeTensors", "whose name ends in other letters"),
        ("consolidated.00.pth", "pickled weights"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_what_is_there_in_place_of_weights_is_named(file: str, words: str, has_config: bool, tmp_path: Path) -> None:
    home = directory(tmp_path / "model", {}, index=False)
    (home / file).write_bytes(b"GGUF")
    if not has_config:
        (home / "config.json").unlink()
    finding = refused(home)
    if finding.code == "missing-side-file":
        assert not has_config
        assert file.lower().endswith((".part", ".safetensors"))
        return
    assert finding.code == "missing-shard"
    assert words in finding.message
    assert file in str(finding.found)


def test_a_configuration_that_is_nearly_there(tmp_path: Path) -> None:
    home = directory(tmp_path / "model", {"model.safetensors": {"a": [2]}}, index=False)
    (home / "config.json").rename(home / "Config.json")
    assert refused(home).next == "rename Config.json to config.json"
    (home / "Config.json").rename(home.parent / "elsewhere")
    (home / "config.json").symlink_to("../blobs/config")
    assert refused(home).found == "a link to ../blobs/config, which is not there"
