"""Drafts for architectures that nobody knows: known ones in disguise come out whole, foreign text stays text."""

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from firstlight.engine.errors import Refused
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.registry import Families
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.alignment import align
from firstlight.workbench.kinship import kin_of
from firstlight.workbench.propose import draft_text, propose, unresolved

Get = Callable[[str], Path]


def disguised(source: Path, home: Path) -> Path:
    """The same checkpoint under a model type that nobody knows."""
    home.mkdir()
    for file in source.iterdir():
        (home / file.name).write_bytes(file.read_bytes())
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "model_type": "nobody", "architectures": ["Nobody"]}))
    return home


def loaded(draft: Path) -> Family:
    spec = importlib.util.spec_from_file_location("draft", draft)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    family = module.FAMILY
    assert isinstance(family, Family)
    return family


@pytest.mark.parametrize(("name", "open_"), [("llama", 0), ("qwen2", 0), ("qwen3", 0), ("mixtral", 1)])
def test_a_known_architecture_in_disguise_is_drafted_whole(
    checkpoint: Get, tmp_path: Path, name: str, open_: int
) -> None:
    home = disguised(checkpoint(name), tmp_path / "nobody")
    report = propose(home, tmp_path / "draft.py")
    assert not report.tables.get("unmatched")
    assert len(unresolved((tmp_path / "draft.py").read_text())) == open_
    families = Families()
    families.register(loaded(tmp_path / "draft.py"))
    opened = Checkpoint.open(home)
    spec, matcher = families.describe(opened.config)
    ledger = account(opened, spec, matcher)
    assert ledger.complete, ledger.findings
    native, _ = Families().describe(json.loads((checkpoint(name) / "config.json").read_text()))
    assert {p.name: p.shape for p in spec.parameters()} == {p.name: p.shape for p in native.parameters()}
    ours, theirs = spec.layers[0].mixer, native.layers[0].mixer
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.scale) == (  # type: ignore[union-attr]
        theirs.num_heads, theirs.num_kv_heads, theirs.head_dim, theirs.scale,  # type: ignore[union-attr]
    )  # fmt: skip


def write(home: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> Path:
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(config))
    arrays = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, home / "model.safetensors")
    return home


def test_what_is_not_certain_is_marked_and_nothing_is_made_up(tmp_path: Path) -> None:
    shapes = {
        "words.weight": (50, 16),
        "blocks.0.mystery.weight": (7, 5, 3),
        "blocks.0.attn.qkv.weight": (16 + 2 * 8, 16),
        "blocks.0.attn.proj.weight": (16, 16),
        "blocks.0.ln.weight": (16,),
    }
    home = write(
        tmp_path / "odd",
        {
            "model_type": "odd",
            "n_layer": 1,
            "d_model": 16,
            "n_head": 4,
            "n_kv_heads": 2,
            "vocab_size": 50,
            "act": "wobble",
        },
        shapes,
    )
    report = propose(home, tmp_path / "odd.py")
    text = (tmp_path / "odd.py").read_text()
    ast.parse(text)
    assert report.status == "failed"
    assert [row["tensors"] for row in report.tables["unmatched"]] == ["blocks.{i}.mystery.weight"]
    marks = " | ".join(unresolved(text))
    for said in ("wobble", "positions", "epsilon", "one norm a layer", "mystery"):
        assert said in marks, said
    assert "one after another, or by head in turn?" in text
    found = align(Checkpoint.open(home))
    assert found.sizes.head_dim == 4


def test_keys_that_the_draft_does_not_read_are_asked_for(checkpoint: Get, tmp_path: Path) -> None:
    """All tensors are recognised, and a cap on the logits is in the configuration alone: the draft is not finished."""
    home = disguised(checkpoint("llama"), tmp_path / "nobody")
    config = json.loads((home / "config.json").read_text())
    assert propose(home, tmp_path / "plain.py").passed
    (home / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 15.0}))
    report = propose(home, tmp_path / "capped.py")
    assert report.status == "failed"
    assert any("final_logit_softcapping" in row["question"] for row in report.tables["to_decide"])


def test_a_number_of_another_meaning_is_no_width(tmp_path: Path) -> None:
    shapes = {
        "words.weight": (50, 16),
        "last.weight": (16,),
        "blocks.0.attn.q.weight": (16, 16),
        "blocks.0.attn.k.weight": (16, 16),
        "blocks.0.attn.v.weight": (16, 16),
        "blocks.0.attn.o.weight": (16, 16),
        "blocks.0.mlp.fc1.weight": (64, 16),
        "blocks.0.mlp.fc2.weight": (16, 64),
    }
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 4, "vocab_size": 50, "n_positions": 64, "act": "relu"}
    home = write(tmp_path / "odd", {"model_type": "odd", **sizes}, shapes)
    propose(home, tmp_path / "odd.py")
    text = (tmp_path / "odd.py").read_text()
    assert any("feed-forward width (64)" in mark for mark in unresolved(text))
    assert "heads = kv_heads = config.size('n_head')" in text  # as many keys as queries
    assert any("no norm has weights" in mark for mark in unresolved(text)) is False


def test_families_that_know_the_names_are_told(checkpoint: Get, tmp_path: Path) -> None:
    report = propose(disguised(checkpoint("deepseek_v3"), tmp_path / "nobody"), tmp_path / "draft.py")
    known = {row["tensors"]: row["known_as"] for row in report.tables["unmatched"]}
    (latent,) = [said for name, said in known.items() if "kv_a_proj_with_mqa" in name]
    assert "mixer.kv_a.weight in " in latent
    assert "deepseek_v3" in [row["family"] for row in report.tables["nearest_families"]]


def test_names_from_a_checkpoint_never_become_code(tmp_path: Path) -> None:
    evil = 'x"""\nimport os\nos.system("true")\n#'
    shapes = {"words.weight": (50, 16), f"blocks.0.{evil}.weight": (3, 3), f"blocks.0.attn.{evil}q.weight": (16, 16)}
    config = {"model_type": evil, "n_layer": 1, "d_model": 16, "vocab_size": 50, "act": evil, evil: 16}
    home = write(tmp_path / "evil", config, shapes)
    text = draft_text("evil", evil, align(Checkpoint.open(home)), kin_of([]))
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert {type(node).__name__ for node in tree.body} <= {"Expr", "ImportFrom", "FunctionDef", "Assign", "AnnAssign"}


def test_a_file_that_is_there_is_not_written_over(checkpoint: Get, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    with pytest.raises(Refused, match="is there already"):
        propose(checkpoint("llama"), tmp_path / "mine.py")
    assert (tmp_path / "mine.py").read_text() == "mine"
