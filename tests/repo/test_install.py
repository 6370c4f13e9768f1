"""The package installs as a wheel, editable and strictly editable, and lives beside PyPI's `kernels`."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repo.tree import CODE_FOLDERS, ROOT, files, python_files

pytestmark = pytest.mark.slow

STAND_IN = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "kernels"
version = "9.9"
"""

# Run in the copy's root, where `kernels/` is a folder of ours: what a program started there gets to see.
PROBE = """
import importlib.resources, json, multiprocessing, pkgutil, sys
import kernels, firstlight.engine, firstlight.kernels
def child(queue):
    import firstlight.engine.weights
    queue.put(firstlight.engine.weights.__file__)
def modules(package):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield found.name
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    facts = importlib.resources.files("firstlight.data")
    print(json.dumps({
        "stand_in": kernels.WHO,
        "engine": firstlight.engine.__file__,
        "kernels": list(firstlight.kernels.__path__),
        "engine_modules": sorted(modules(firstlight.engine)),
        "devices": len(json.loads((facts / "hardware.json").read_text())["accelerators"]),
        "models": len(list((facts / "models").glob("*.json"))),
        "spawned": queue.get(timeout=240),
        "torch": "torch" in sys.modules,
    }))
    process.join()
"""


def _pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, *arguments, "-q", "--disable-pip-version-check"]
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a clone would hold, without samples and tests: no builds of earlier days, no ignored files."""
    target = tmp_path_factory.mktemp("clone")
    for file in files():
        if (
            file.parts[0] in CODE_FOLDERS
            or len(file.parts) == 1
            or (file.parts[0] == "data" and "samples" not in file.parts)
        ):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target / file)
    return target


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from a clean copy."""
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, copy)
    shutil.rmtree(copy / "build")
    return next(out.glob("firstlight-*.whl"))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of a distribution named `kernels` with a regular package of that name, like PyPI's."""
    source = tmp_path_factory.mktemp("stand-in")
    (source / "pyproject.toml").write_text(STAND_IN)
    (source / "kernels").mkdir()
    (source / "kernels" / "__init__.py").write_text("WHO = 'the stand-in'\n")
    return source


def _environment(folder: Path) -> Path:
    """A fresh environment's interpreter; it sees the dependencies installed here, but no `.pth` hooks of theirs."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def _probe(python: Path, root: Path) -> dict[str, object]:
    (root / "probe.py").write_text(PROBE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run([python, "probe.py"], cwd=root, capture_output=True, text=True, env=clean, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def _engine_modules() -> list[str]:
    names = {".".join(("firstlight", *f.with_suffix("").parts)) for f in python_files("engine")}
    return sorted({name.removesuffix(".__init__") for name in names} - {"firstlight.engine"})


def test_wheel_holds_the_code_the_facts_and_nothing_else(wheel: Path) -> None:
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    kinds = (".py", ".cpp", ".h", ".css", ".html", ".js")  # C++ is compiled on the machine that runs it
    code = {f for f in files() if f.parts[0] in CODE_FOLDERS and (f.suffix in kinds or f.name == "py.typed")}
    facts = {f for f in files() if f.parts[0] == "data" and f.suffix in (".json", ".yaml") and len(f.parts) <= 3}
    facts = {f for f in facts if len(f.parts) == 2 or f.parts[1] == "models"} | {Path("data/__init__.py")}
    assert inside == {f"firstlight/{f.as_posix()}" for f in code | facts}


def test_wheel_beside_a_distribution_named_kernels(wheel: Path, stand_in: Path, copy: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env")
    _pip("install", "--no-deps", "--no-build-isolation", "--no-index", wheel, stand_in, python=python)
    seen = _probe(python, copy)
    site = str(tmp_path / "env" / "lib")
    assert seen["stand_in"] == "the stand-in"
    assert str(seen["engine"]).startswith(site)
    assert all(path.startswith(site) for path in seen["kernels"])
    assert str(seen["spawned"]).startswith(site)
    assert seen["engine_modules"] == _engine_modules()
    assert seen["devices"] > 10
    assert seen["models"] > 10
    assert not seen["torch"]


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_install(mode: str, stand_in: Path, copy: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env")
    settings = ["--config-settings", f"editable_mode={mode}"]
    _pip("install", "--no-deps", "--no-build-isolation", "--no-index", stand_in, python=python)
    _pip("install", "--no-deps", "--no-build-isolation", "--no-index", *settings, "-e", copy, python=python)
    seen = _probe(python, copy)
    assert seen["stand_in"] == "the stand-in"
    assert str(seen["engine"]).startswith(str(copy))
    assert str(seen["spawned"]).startswith(str(copy))
    assert seen["engine_modules"] == _engine_modules()
    assert seen["models"] > 10


def test_the_command_starts_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env")
    _pip("install", "--no-deps", "--no-index", wheel, python=python)
    for command in ([python.with_name("firstlight")], [python, "-m", "firstlight.workbench"]):
        run = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert "scan" in run.stdout
