"""Compile the kernels that cases would launch, for an H100 or H200, on a machine that has neither: one JSON line each.

The launchers run as they are, on CPU tensors; a stand-in driver names the target, and every launch stops after
compilation. Run without TRITON_INTERPRET. Arguments: OPERATOR[:WORD] ..., to take the cases whose name contains WORD.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from firstlight.kernels import testing, triton_support
from firstlight.kernels.registry import implementations


class Hopper:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(wanted: list[str]) -> None:
    driver.set_active(Hopper())
    run = JITFunction.run
    told: set[str] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in told:
            told.add(kernel.hash)
            print(json.dumps({"kernel": self.fn.__name__, "shared_bytes": kernel.metadata.shared}), flush=True)
        return kernel

    JITFunction.run = compile_only
    triton_support.needs_upcast = lambda x: False  # what the interpreter needs and a GPU does not
    for one in wanted:
        operator, _, word = one.partition(":")
        launch = {one.name: one for one in implementations(operator)}["triton"].load()
        for case in testing.cases(operator):
            if word in case.name:
                call = case.make(torch.device("cpu"), torch.bfloat16)
                launch(*call.args, **call.kwargs)


if __name__ == "__main__":
    main(sys.argv[1:])
