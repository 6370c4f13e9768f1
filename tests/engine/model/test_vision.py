"""Every kind of tower, merger and position gives what transformers gives: features, layers, logits, greedy tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.runtime import Engine
from firstlight.workbench.golden import Golden
from tests import vision_checkpoints as vision
from tests.engine.vision_ranks import TraceJob, run_traces
from tests.families.verified import tell

LIMIT = 3e-5  # float32, relative to the largest value of the reference


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The checkpoint and the golden file of a model, made once a session."""
    root = tmp_path_factory.mktemp("vision")

    def make(name: str) -> tuple[Path, Path]:
        home = vision.build(name, root)
        return home, vision.write_golden(name, home)

    return make


def errors(golden: Golden, found: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest differences relative to the largest value, by name, at tokens that are real."""
    result = {}
    for name, theirs in golden.outputs.items():
        if name == "generated" or name not in found:
            continue
        ours, expected = found[name], theirs
        if name != "image_features":
            ours, expected = ours[golden.mask], expected[golden.mask]
        assert ours.shape == expected.shape, name
        result[name] = float(np.abs(ours - expected).max() / np.abs(expected).max())
    return result


@pytest.mark.parametrize("name", vision.MODELS)
def test_one_rank_equals_transformers(
    made: Callable[[str], tuple[Path, Path]], name: str, request: pytest.FixtureRequest
) -> None:
    home, path = made(name)
    golden = Golden.read(path)
    engine = Engine.start(str(home), device="cpu", dtype="F32", max_context=128, max_batch=4)
    try:
        assert engine.ledger().complete
        found = engine.trace(golden.input_ids, golden.mask.astype(np.int64), golden.pictures, steps=4)
    finally:
        engine.close()
    worst = errors(golden, found)
    assert set(worst) == set(golden.outputs) - {"generated"}
    assert max(worst.values()) <= LIMIT, worst
    np.testing.assert_array_equal(found["generated"], golden.outputs["generated"])
    assert np.abs(golden.outputs["logits"]).max() > 0.5, "logits too small to tell anything"
    tell(request, home, "image", max(worst.values()))


@pytest.mark.parametrize(("name", "budget"), [("qwen3_vl", 11), ("gemma3", 30), ("glm4v", 7), ("idefics3", 13)])
def test_a_prompt_cut_into_steps_gives_the_same_tokens(
    made: Callable[[str], tuple[Path, Path]], name: str, budget: int
) -> None:
    """Cuts fall inside pictures, except where their tokens see each other; other sequences decode beside them."""
    home, path = made(name)
    golden = Golden.read(path)
    options = {"max_context": 128, "max_batch": 4, "token_budget": budget}
    engine = Engine.start(str(home), device="cpu", dtype="F32", **options)
    try:
        found = engine.trace(golden.input_ids, golden.mask.astype(np.int64), golden.pictures, steps=4)
    finally:
        engine.close()
    np.testing.assert_array_equal(found["generated"], golden.outputs["generated"])


def test_meshes_give_what_transformers_gives(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Tensor and pipeline parallel, free running and layer by layer; deep features cross to where they are added."""
    meshes = (Mesh(tp=2), Mesh(pp=2))
    jobs = []
    for name in vision.MODELS:
        home, golden = made(name)
        for mesh in (*meshes, *((Mesh(pp=3),) if name == "qwen3_vl" else ())):
            for forced in (False, True) if name in ("qwen3_vl", "gemma3") else (False,):
                out = tmp_path / f"{name}-{mesh.tp}-{mesh.pp}-{forced}"
                jobs.append(TraceJob(home, golden, mesh, out, forced))
    run_traces(jobs, tmp_path / "store")
    for job in jobs:
        golden = Golden.read(job.golden)
        worst = errors(golden, job.results())
        assert set(worst) >= {"hidden.1", "logits", "image_features"}
        assert max(worst.values()) <= LIMIT, (job, worst)
        tell(request, job.checkpoint, f"tp{job.mesh.tp}" if job.mesh.tp > 1 else f"pp{job.mesh.pp}")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_tensors_of_no_picture_are_text_alone(made: Callable[[str], tuple[Path, Path]], name: str) -> None:
    home, path = made(name)
    golden = Golden.read(path)
    engine = Engine.start(str(home), device="cpu", dtype="F32", max_context=128, max_batch=4)
    try:
        empty = {key: value[:0] for key, value in golden.pictures.items()}
        found = engine.trace(golden.input_ids[2:], None, empty)
    finally:
        engine.close()
    expected = golden.outputs["logits"][2:]
    np.testing.assert_allclose(found["logits"], expected, atol=LIMIT * np.abs(expected).max())
