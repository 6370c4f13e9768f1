"""Steps divided by tokens while serving: chunks of long prompts beside decodes, over sp, and over ep with experts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine

Get = Callable[[str], Path]
READY_S = 240.0
BUDGET = 24  # tokens a step: prompts come in chunks, beside the decodes of others


@pytest.mark.parametrize(
    ("name", "mesh", "exchange"),
    [
        ("mistral", Mesh(sp=2, dp=2), "auto"),
        ("deepseek_v3", Mesh(ep=2, sp=2), "all-to-all"),  # decodes are divided as well
    ],
)
def test_chunks_and_decodes_give_the_tokens_of_one_rank(
    checkpoint: Get, tmp_path: Path, name: str, mesh: Mesh, exchange: str
) -> None:
    path, random = checkpoint(name), np.random.default_rng(3)
    prompts = [[int(id_) for id_ in random.integers(3, 90, length)] for length in (40, 3, 31, 17, 44, 9)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.9, seed=11)
    single = Engine.start(str(path), dtype="F32", threads=1, max_batch=4, token_budget=BUDGET)
    wanted = [single.complete(prompt, params=params).tokens for prompt in prompts]
    options = {"dtype": "F32", "threads": 4, "max_batch": 4, "token_budget": BUDGET, "expert_exchange": exchange}
    with Host.start(path, mesh, run_dir=tmp_path / "run", **options) as host:  # type: ignore[arg-type]
        client = host.wait_ready(READY_S)
        streams = [client.generate(prompt, params=params) for prompt in prompts]  # all at once
        found = [tuple(token for delta in stream for token in delta.tokens) for stream in streams]
        calls = {row for rank in client.profile(32, 2, 1) for row in rank.prefill.collectives}
    assert found == wanted
    assert any("all_gather" in str(call) for call in calls), "keys and values were gathered: rows were divided"
