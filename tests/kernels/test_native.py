"""The native library: compiled once, in place at once, for other CPUs too, and loud when the compiler fails."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.kernels.native import build, library
from firstlight.kernels.packed import native as packed
from firstlight.kernels.packed import reference
from firstlight.kernels.packed.cases import FP8_BLOCKS, INT4_ZEROS, NVFP4
from firstlight.kernels.registry import choose
from tests.waiting import gone, until

pytestmark = pytest.mark.skipif(not build.available()[0], reason=build.available()[1])


def test_the_threads_are_those_of_torch() -> None:
    """A second OpenMP runtime would be a second pool of threads on the same cores."""
    build.operators()
    runtimes = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if any(name in line for name in ("libgomp", "libiomp", "libomp"))
    }
    assert runtimes == {str(build.openmp_runtime())}


def test_the_library_is_found_again_and_a_change_makes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.fingerprint()
    assert build.fingerprint() == first
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    assert build.fingerprint() != first


def test_operators_are_kept_where_the_caller_says(tmp_path: Path) -> None:
    known = Path(build.operators()._name)
    kept = tmp_path / "a folder" / known.name
    kept.parent.mkdir()
    shutil.copy(known, kept)
    choose("cpu", torch.bfloat16, cache_dir=kept.parent)
    assert str(kept) in Path("/proc/self/maps").read_text()


def test_a_failing_compiler_is_an_error_that_shows_its_words(tmp_path: Path) -> None:
    with pytest.raises(library.BuildError, match="-fno-such-flag"):
        build.compile_library(tmp_path / "native.so", "-fno-such-flag")
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    possible, reason = build.available.__wrapped__()
    assert not possible
    assert "no-such-compiler" in reason


def test_a_cpu_without_bfloat16_dot_products_gets_the_same_product_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "portable.so"
    build.compile_library(path, "-DHAS_BF16_DOT=0")
    portable = ctypes.CDLL(str(path))
    assert not portable.firstlight_has_bf16_dot()
    weight_FH, bias_F = (torch.randn(67, 131) / 11).bfloat16(), torch.randn(67).bfloat16()
    for rows in (1, 7, 30):
        x_TH = torch.randn(rows, 131).bfloat16()
        y_TF = torch.full((rows, 67), float("nan"), dtype=torch.bfloat16)
        function = portable.firstlight_linear
        function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]
        function(
            weight_FH.data_ptr(), bias_F.data_ptr(), x_TH.data_ptr(), y_TF.data_ptr(), rows, 67, 131, 2
        )  # fmt: skip
        true = torch.nn.functional.linear(x_TH.double(), weight_FH.double(), bias_F.double())
        torch.testing.assert_close(y_TF.double(), true, atol=1e-2, rtol=8e-3)

    def of_portable(name: str, arguments: str) -> object:
        found = portable[f"firstlight_{name}"]
        found.restype, found.argtypes = None, [build._TYPES[letter] for letter in arguments]
        return found

    monkeypatch.setattr(packed, "function", of_portable)
    for form in (NVFP4, INT4_ZEROS, FP8_BLOCKS):
        matrix = form.make((48, 100), torch.Generator().manual_seed(2), torch.device("cpu"))
        assert torch.equal(packed.unpack(matrix, torch.bfloat16), reference.unpack(matrix).bfloat16())


def test_what_is_being_compiled_ends_with_whoever_is_killed(tmp_path: Path) -> None:
    """A compiler's driver has processes of its own: they end too, however little time there was."""
    started = tmp_path / "started"
    command = f"sleep 3600 & echo $! > {started}.new; mv {started}.new {started}; wait"
    words = f"from firstlight.kernels.native.library import run_together; run_together([['sh', '-c', {command!r}]])"
    owner = subprocess.Popen([sys.executable, "-c", words])
    until(started.exists, "the command runs")
    owner.kill()
    owner.wait()
    gone([int(started.read_text())], "the compiler goes on")


def test_many_that_want_one_library_at_once_never_meet_a_folder_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making the folder, opening it and looking at it, whoever had it may take it away."""
    path, whole = tmp_path / "one.so", os.open
    scratch = path.with_name("one.so.making")
    went: list[str] = []

    def opened(place: str | os.PathLike[str], flags: int, *rest: int, **more: Any) -> int:
        if place != scratch or len(went) >= 2:
            return whole(place, flags, *rest, **more)
        went.append("before" if not went else "after")
        if went[-1] == "before":
            scratch.rmdir()
            return whole(place, flags, *rest, **more)
        found = whole(place, flags, *rest, **more)
        scratch.rmdir()
        return found

    monkeypatch.setattr(os, "open", opened)
    library.make_once(path, lambda made: made.write_text("made") and None)
    assert (path.read_text(), went, scratch.exists()) == ("made", ["before", "after"], False)
    scratch.symlink_to(tmp_path / "nowhere")
    path.unlink()
    with pytest.raises(FileExistsError):
        library.make_once(path, lambda made: made.write_text("made") and None)


def test_a_library_is_made_once_and_what_was_left_of_it_goes(tmp_path: Path) -> None:
    """Whoever waited for the other finds it made; nothing stays beside it."""
    path = tmp_path / "cache" / "one.so"
    left = path.with_name("one.so.making") / "of-somebody-killed"
    left.mkdir(parents=True)
    made: list[Path] = []

    def build(file: Path) -> None:
        made.append(file)
        file.write_text("made")

    threads = [threading.Thread(target=library.make_once, args=(path, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert path.read_text() == "made"
    assert list(path.parent.iterdir()) == [path]
