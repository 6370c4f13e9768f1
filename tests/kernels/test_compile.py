"""The kernels compile to Hopper's machine code, and fit its shared memory: all that can be shown without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
WANTED = (
    "rms_norm:63x100",
    "rotary:interleaved joined",
    "gated_activation:gelu",
    "write_cache:one page each",
    "attention:sinks, window 8",
    "attention:latent MLA",
    "attention:prefill 100",
    "attention:one long among short",
    "causal_conv:steps and chunks",
    "linear_attention:delta, steps",
    "linear_attention:by channel, steps",
    "selective_scan:steps and chunks",
    "router_topk:odd groups",
    "moe:odd sizes",
    "linear_packed:INT4, a last",
    "linear_packed:FP8",
    "moe_packed:MXFP4, one token",
    "moe_packed:INT8",
    "linear_packed:NVFP4, its scales divided",
    "linear_packed:INT4, inputs in any order",
    "grouped_matmul:many rows",
)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed on this platform")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script), *WANTED],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in compiled} == {
        "_rms_norm_kernel",
        "_rotary_kernel",
        "_gated_activation_kernel",
        "_write_cache_kernel",
        "_attention_kernel",
        "_join_kernel",
        "_conv_kernel",
        "_keep_kernel",
        "_recurrent_kernel",
        "_scan_kernel",
        "_router_kernel",
        "_grouped_matmul_kernel",
        "_combine_kernel",
    }
    assert all(row["shared_bytes"] <= SHARED_BYTES_OF_A_BLOCK for row in compiled), compiled
