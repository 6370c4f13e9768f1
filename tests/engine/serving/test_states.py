"""States per sequence in the engine: chunks, company, slots that others had before, several ranks, trace, profile."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import Completion, SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import completion_of
from firstlight.workbench.golden import Golden
from tests.checkpoints import inputs

LENGTH = 6
NAMES = ("qwen3_next", "nemotron_h", "mamba2")  # delta rule and attention; one block a layer; no attention at all

Get = Callable[[str], Path]


def start(path: Path, **options: Any) -> Engine:
    return Engine.start(str(path), **{"max_context": 96, "threads": 1, "dtype": "F32", **options})


def prompts(name: str) -> list[list[int]]:
    """Five prompts of very different lengths."""
    ids = inputs(name, batch=1)["input_ids"][0]
    return [[int(id_) for id_ in ids[:length]] for length in (5, 1, 66, 23, 2)]


def together(engine: Engine, asked: list[list[int]]) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    streams = [engine.submit(prompt, params=params) for prompt in asked]
    answers: list[Completion] = [completion_of(engine._read(stream)) for stream in streams]
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def expected(name: str, checkpoint: Get) -> Iterator[list[tuple[int, ...]]]:
    """Each prompt alone in an engine of its own slot, whole; held against whole passes over prompt and answer."""
    engine = start(checkpoint(name), max_batch=1)
    answers = [together(engine, [prompt])[0] for prompt in prompts(name)]
    for prompt, answer in zip(prompts(name), answers, strict=True):
        ids = np.array([[*prompt, *answer]])
        logits = engine.trace(ids)["logits"][0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1)) == answer
    yield answers
    engine.close()


def test_company_chunks_and_used_slots_change_nothing(
    name: str, checkpoint: Get, expected: list[tuple[int, ...]]
) -> None:
    """Three slots for five prompts, twice over: prefill chunks of seven tokens and decodes in one batch."""
    engine = start(checkpoint(name), max_batch=3, token_budget=7)
    rank = engine.worker.rank
    for spec, layer in zip(rank.model.cache_specs, rank.cache.layers, strict=True):
        for state in layer[len(spec.tensors) :]:
            state.fill_(torch.nan)  # what was never written, or was another's, must not be read
    for _ in range(2):
        assert together(engine, prompts(name)) == expected
    engine.scheduler.check()
    engine.close()


def test_a_sequence_that_ends_early_leaves_nothing_behind(
    name: str, checkpoint: Get, expected: list[tuple[int, ...]]
) -> None:
    engine = start(checkpoint(name), max_batch=1)
    stream = engine.submit(prompts(name)[2], params=SamplingParams(max_new_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort(stream)
    assert together(engine, prompts(name)) == expected
    engine.close()


def test_two_ranks_give_the_same_tokens(checkpoint: Get, tmp_path: Path) -> None:
    asked = prompts("nemotron_h")
    engine = start(checkpoint("nemotron_h"), max_batch=2)
    alone = together(engine, asked)
    engine.close()
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    mesh = Mesh(pp=2)
    with Host.start(checkpoint("nemotron_h"), mesh, run_dir=tmp_path, dtype="F32", max_batch=2, max_context=96) as host:
        host.wait_ready(240)
        assert [host.client().complete(prompt, params=params).tokens for prompt in asked] == alone


def test_padding_on_the_left_is_no_input(name: str, checkpoint: Get) -> None:
    """The reference masks what padding would leave in its states; here there is no padding at all."""
    given = inputs(name)
    ids, mask = given["input_ids"], given["attention_mask"]
    short = int(mask[-1].sum())
    left = {"input_ids": ids.copy(), "attention_mask": mask.copy()}
    left["input_ids"][-1] = np.roll(ids[-1], ids.shape[1] - short)
    left["attention_mask"][-1] = np.roll(mask[-1], ids.shape[1] - short)
    engine = start(checkpoint(name))
    right, rolled = (engine.trace(one["input_ids"], one["attention_mask"])["logits"] for one in (given, left))
    np.testing.assert_allclose(rolled[-1, -short:], right[-1, :short], atol=1e-5)
    engine.close()


def test_a_trace_on_given_inputs_and_a_profile_leave_running_sequences_alone(
    name: str, checkpoint: Get, golden_file: Get, expected: list[tuple[int, ...]]
) -> None:
    golden = Golden.read(golden_file(name))
    engine = start(checkpoint(name), max_batch=3)
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    streams = [engine.submit(prompt, params=params) for prompt in prompts(name)[:2]]
    engine.step()
    given = {key: value for key, value in golden.outputs.items() if key.startswith("hidden.")}
    ids, mask = golden.inputs()["input_ids"], golden.inputs()["attention_mask"]
    forced = engine.trace(ids, mask, inputs=given)
    for key, value in given.items():
        if key != "hidden.0":
            seen = mask.astype(bool)
            assert np.abs(forced[key][seen] - value[seen]).max() <= 2e-5 * np.abs(value[seen]).max(), key
    (profile,) = engine.profile(prompt_tokens=16, decode_steps=2)
    assert profile.decode.layers_ms
    assert [completion_of(engine._read(stream)).tokens for stream in streams] == expected[:2]
    engine.close()


def test_states_are_reserved_and_counted(checkpoint: Get) -> None:
    engine = start(checkpoint("mamba2"), max_batch=3, warm_up=True)
    spec = engine.worker.rank.spec
    state = sum(layer.cache().state_bytes(4) for layer in spec.layers)
    assert state == 2 * 4 * ((64 + 2 * 24) * 3 + 8 * 12 * 8)  # layers, bytes, convolution, memory
    held = sum(t.numel() * t.element_size() for layer in engine.worker.rank.cache.layers for t in layer)
    assert held == 3 * state
    engine.close()
