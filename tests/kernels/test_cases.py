"""Every implementation of every operator against its reference, on every case, in memory that starts as NaN."""

from __future__ import annotations

import os

import pytest
import torch

from firstlight.kernels import testing
from firstlight.kernels.registry import implementations, operator_names
from firstlight.kernels.registry_types import Implementation, Situation
from firstlight.kernels.testing import Case

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
OPERATORS = tuple(name for name in operator_names() if name in testing.FOLDERS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supported(implementation: Implementation, case: Case, device_type: str, dtype: torch.dtype) -> bool:
    situation = Situation(device_type, dtype, case.shapes, has_triton=True, interpret=INTERPRET)
    return implementation.supports(situation)[0]


def combinations(device_type: str) -> list[object]:
    """Every implementation that can run there, with every case small enough for a test."""
    found: list[object] = []
    for operator in OPERATORS:
        for implementation in implementations(operator):
            if implementation.name == "reference":
                continue
            for case in testing.cases(operator):
                if case.benchmark and device_type == "cpu":
                    continue
                for dtype in DTYPES[:1] if operator in testing.IN_FLOAT32 else DTYPES:
                    if supported(implementation, case, device_type, dtype):
                        title = f"{operator}-{implementation.name}-{case.name}-{str(dtype).removeprefix('torch.')}"
                        found.append(pytest.param(implementation, case, dtype, id=title))
    return found


# The interpreter computes with numpy, which warns where hardware gives infinity, as it should: sigmoid(-1000), say.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("implementation", "case", "dtype"), combinations("cpu"))
def test_on_the_cpu(implementation: Implementation, case: Case, dtype: torch.dtype) -> None:
    outcome = testing.check(implementation.operator, implementation.name, case, torch.device("cpu"), dtype)
    assert outcome.passed, outcome


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "case", "dtype"), combinations("cuda"))
def test_on_the_gpu(implementation: Implementation, case: Case, dtype: torch.dtype) -> None:
    outcome = testing.check(implementation.operator, implementation.name, case, torch.device("cuda"), dtype)
    assert outcome.passed, outcome
