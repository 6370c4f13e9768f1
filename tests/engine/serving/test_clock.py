"""Times inside a step: waiting for the stage before is no work of a block."""

import pytest
import torch

from firstlight.engine.parallel.comm import CommRecord
from firstlight.engine.serving.clock import Clock, LayerTap


def record(operation: str, start_s: float, duration_s: float) -> CommRecord:
    return CommRecord(axis="pp", operation=operation, nbytes=8, start_s=start_s, duration_s=duration_s)


def test_the_first_block_of_a_stage_begins_when_its_input_is_there() -> None:
    tap = LayerTap(Clock(torch.device("cpu")))
    tap.starts_s = {"layers.2.mixer": 10.0, "layers.2.ffn": 19.0}
    tap.layers_s = {"layers.2.mixer": 9.0, "layers.2.ffn": 1.0}
    calls = [record("receive", 10.5, 6.0), record("receive", 16.5, 0.5), record("all_reduce", 18.0, 0.5)]
    tap.leave_out([*calls, record("receive", 19.0, 0.5)])
    assert tap.layers_s == pytest.approx({"layers.2.mixer": 2.0, "layers.2.ffn": 1.0})
    assert tap.starts_s == pytest.approx({"layers.2.mixer": 17.0, "layers.2.ffn": 19.0})
    tap.leave_out([record("all_reduce", 17.0, 0.5), record("receive", 17.5, 0.5)])
    assert tap.layers_s["layers.2.mixer"] == pytest.approx(2.0), "a first stage receives nothing before it begins"
    LayerTap(Clock(torch.device("cpu"))).leave_out(calls)
