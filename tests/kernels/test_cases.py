"""Every implementation of every operator against its reference, on every case, in memory that starts as NaN."""

from __future__ import annotations

import os

import pytest
import torch

from firstlight.kernels import bench, testing
from firstlight.kernels.registry import implementations, operator_names
from firstlight.kernels.registry_types import Implementation, Situation
from firstlight.kernels.testing import Case

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
OPERATORS = tuple(name for name in operator_names() if name in testing.FOLDERS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supported(implementation: Implementation, case: Case, dtype: torch.dtype) -> bool:
    situation = Situation("cpu", dtype, case.shapes, has_triton=True, interpret=INTERPRET)
    return implementation.supports(situation)[0]


def dtypes_of(implementation: Implementation, number: int) -> tuple[torch.dtype, ...]:
    """Those that a case is tried in; where kernels are interpreted, which is slow, one of the two narrow ones."""
    if implementation.operator in testing.IN_FLOAT32:
        return DTYPES[:1]
    return (DTYPES[0], DTYPES[1 + number % 2]) if INTERPRET and implementation.name == "triton" else DTYPES


def combinations() -> list[object]:
    """Every implementation that can run here, with every case small enough for a test."""
    found: list[object] = []
    for operator in OPERATORS:
        for implementation in implementations(operator):
            if implementation.name == "reference":
                continue
            for number, case in enumerate(case for case in testing.cases(operator) if not case.benchmark):
                for dtype in dtypes_of(implementation, number):
                    if supported(implementation, case, dtype):
                        title = f"{operator}-{implementation.name}-{case.name}-{str(dtype).removeprefix('torch.')}"
                        found.append(pytest.param(implementation, case, dtype, id=title))
    return found


# The interpreter computes with numpy, which warns where hardware gives infinity, as it should: sigmoid(-1000), say.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("implementation", "case", "dtype"), combinations())
def test_on_the_cpu(implementation: Implementation, case: Case, dtype: torch.dtype) -> None:
    outcome = testing.check(implementation.operator, implementation.name, case, torch.device("cpu"), dtype)
    assert outcome.passed, outcome


@pytest.mark.gpu
def test_on_the_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """All cases natively, compiled in several processes at once."""
    passed = bench.main(["--device", "cuda", "--check", "--no-speeds"]) == 0
    assert passed, capfd.readouterr().out
