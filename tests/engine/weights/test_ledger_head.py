"""The output head: tied, of its own, or both, whatever a flag at either level of a configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights import ledger as ledger_module
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.source import Source
from firstlight.engine.weights.synthesize import synthesize
from tests.engine.weights.accounts import one, settle
from tests.engine.weights.files import LLAMA


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    synthesize(LLAMA, tmp_path)
    return tmp_path


def test_a_tied_head_is_in_the_account(llama: Path) -> None:
    ledger = settle(llama, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True)
    assert ledger.complete
    assert [(finding.code, finding.severity) for finding in ledger.findings] == [("tied-head", "note")]
    assert ledger.sources["head.weight"] == Source(
        "model.embed_tokens.weight", ((0, 32, 1), (0, 8, 1)), transpose=False, tied=True
    )
    assert ledger.consumed["model.embed_tokens.weight"] == ("embed.weight", "head.weight")


@pytest.mark.parametrize("flag", [False, None])
def test_a_head_that_is_not_tied_must_be_there(flag: bool | None, llama: Path) -> None:
    finding = one(settle(llama, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=flag))
    assert finding.code == "missing-tensor"
    assert finding.tensors == ("head.weight",)
    assert "tie_word_embeddings must say so" in str(finding.next)


def test_a_tied_embedding_that_is_stored_as_the_head_alone_is_told(llama: Path) -> None:
    finding = one(settle(llama, lambda t: t.pop("model.embed_tokens.weight"), tie_word_embeddings=True))
    assert (finding.code, finding.tensors) == ("missing-tensor", ("embed.weight",))
    assert "ties the token embedding to the output head, and lm_head.weight alone is stored" in finding.message
    assert "store lm_head.weight under the embedding's name" in str(finding.next)


def test_a_head_of_its_own_is_used_whatever_the_flag_says(llama: Path) -> None:
    ledger = settle(llama, tie_word_embeddings=True)
    (finding,) = ledger.findings
    assert ledger.complete
    assert (finding.code, finding.severity) == ("conflicting-flag", "warning")
    assert ledger.sources["head.weight"].tensor == "lm_head.weight"
    assert not ledger.sources["head.weight"].tied


def test_an_equal_copy_of_the_embedding(llama: Path) -> None:
    ledger = settle(
        llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), tie_word_embeddings=True
    )
    (finding,) = ledger.findings
    assert (finding.code, finding.severity, finding.found) == ("tied-head", "note", "equal copy")


def test_heads_are_compared_in_steps_and_only_until_they_differ(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: list[int] = []

    def count(self: Checkpoint, name: str, offset_bytes: int = 0, nbytes: int | None = None) -> bytes:
        read_bytes.append(nbytes or 0)
        return Checkpoint.__dict__["_original"](self, name, offset_bytes, nbytes)

    monkeypatch.setattr(Checkpoint, "_original", Checkpoint.read_bytes, raising=False)
    monkeypatch.setattr(Checkpoint, "read_bytes", count)
    checkpoint = Checkpoint.open(llama)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    assert not ledger_module.equal_tensors(checkpoint, head, embed, step_bytes=100)
    assert read_bytes == [100, 100]
    assert ledger_module.equal_tensors(checkpoint, head, head, step_bytes=100)
    assert sum(read_bytes[2:]) == 2 * 32 * 8 * 4


def test_a_head_in_a_file_that_was_cut_is_an_error_not_a_difference(llama: Path) -> None:
    tensors = read(llama / "model.safetensors")
    first = {"lm_head.weight": tensors.pop("lm_head.weight")}
    write(llama / "model-00001-of-00002.safetensors", tensors)
    write(llama / "model-00002-of-00002.safetensors", first)
    (llama / "model.safetensors").unlink()
    path = llama / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    finding = one(settle(llama, tie_word_embeddings=True))
    assert finding.code == "read-failed"
    assert finding.file == path.name


VLM: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {**LLAMA, "tie_word_embeddings": False},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "image_token_index": 31,
}


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("head", [True, False])
def test_the_tie_flag_at_either_level(outer: bool | None, inner: bool | None, head: bool, tmp_path: Path) -> None:
    """A head in the file is used always; an absent one is tied only if a level says so; disagreement is said."""
    config = json.loads(json.dumps(VLM))
    config["text_config"].pop("tie_word_embeddings")
    config.update({} if outer is None else {"tie_word_embeddings": outer})
    config["text_config"].update({} if inner is None else {"tie_word_embeddings": inner})
    synthesize(config, tmp_path, tied=not head)
    checkpoint = Checkpoint.open(tmp_path)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    disagree = None not in (outer, inner) and outer is not inner
    assert disagree == any(finding.code == "conflicting-flag" for finding in spec.findings)
    if head:
        assert ledger.complete
        assert ledger.sources["head.weight"].tensor.endswith("lm_head.weight")
        said = any(finding.code == "conflicting-flag" for finding in ledger.findings)
        assert said == bool(outer or inner), "a head that the flag denies is said"
    else:
        assert ledger.complete == bool(outer or inner)
        if ledger.complete:
            assert ledger.sources["head.weight"].tied
