"""The engine on an accelerator: the same tokens as on the CPU, in this process and behind a host."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.serving.host import Host
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import completion_of
from tests.checkpoints import inputs

pytestmark = pytest.mark.gpu

PROMPTS = ([5, 9, 77, 3], [8], list(range(20, 60)), [100, 7, 7, 30, 12])


@pytest.mark.parametrize("name", ["llama", "llava-clip", "qwen3_moe"])
def test_the_device_gives_what_the_cpu_gives(checkpoint: Callable[[str], Path], name: str) -> None:
    path = str(checkpoint(name))
    given = inputs(name)
    ids, mask = given.pop("input_ids"), given.pop("attention_mask")
    here = Engine.start(path, device="cpu", dtype="F32")
    there = Engine.start(path, device="cuda", dtype="F32", warm_up=True)
    assert there.info().page_size == 64
    wanted, found = here.trace(ids, mask, given, steps=4), there.trace(ids, mask, given, steps=4)
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, atol=2e-3 * np.abs(value).max(), err_msg=key)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.7, seed=3, logprobs=True, top_logprobs=2)
    streams = [[engine.submit(prompt, params=params) for prompt in PROMPTS] for engine in (here, there)]
    for engine in (here, there):
        engine.drain()
    ours, theirs = ([completion_of(iter(_all(stream))).tokens for stream in group] for group in streams)
    assert ours == theirs
    there.scheduler.check()
    (profile,) = there.profile(prompt_tokens=32, decode_steps=4, batch=2)
    assert profile.decode.undisturbed_ms > 0


def _all(stream: object) -> list[object]:
    deltas = []
    while (delta := stream.read(0)) is not None:  # type: ignore[attr-defined]
        deltas.append(delta)
    return deltas


def test_a_host_serves_from_the_device(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with Host.start(checkpoint("llama"), run_dir=tmp_path / "run", device="cuda", dtype="F32") as host:
        client = host.wait_ready(120)
        assert client.info().device.startswith("cuda")
        assert len(client.complete(PROMPTS[2], params=params).tokens) == 8
        memory = client.memory()[0]
        assert memory.bytes_by_role["cache"] > 0
