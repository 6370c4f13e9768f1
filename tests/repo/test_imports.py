"""Imports point one way, heavy libraries have one door each, and planning on a laptop loads no torch."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import CODE_FOLDERS, ROOT, Import, files, imports, module_name, python_files

# Who may import whom; the libraries below all of them are torch and triton.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels", "data"},
    "workbench": {"workbench", "engine", "kernels", "data"},
    "dashboards": {"dashboards", "workbench", "engine", "kernels", "data"},
    "notebooks": {"dashboards", "workbench", "engine", "kernels", "data"},
}

# The command line starts the dashboard, as it would another program: the one place where something is named upwards.
UPWARDS = {("workbench/commands/dashboard.py", "firstlight.dashboards.app")}

# A library -> the only places of the package that may import it.
DOORS = {
    "transformers": ("workbench/reference.py",),
    "panel": ("dashboards/",),
    "fastapi": ("engine/serving/server.py",),
    "starlette": ("engine/serving/server.py",),
    "uvicorn": ("engine/serving/server.py", "engine/serving/protocol.py"),
    "ray": ("engine/parallel/cluster.py",),
    "triton": ("kernels/",),
    "ipywidgets": ("workbench/",),
    "rich": ("workbench/",),
}

# What `firstlight scan` and `plan` need, and what works on numbers alone. They answer in fractions of a second;
# importing torch alone takes longer.
LIGHT_MODULES = (
    "firstlight.engine",
    "firstlight.engine.weights.checkpoint",
    "firstlight.engine.weights.ledger",
    "firstlight.engine.model.spec",
    "firstlight.engine.model.families",
    "firstlight.engine.parallel.mesh",
    "firstlight.engine.parallel.plan",
    "firstlight.engine.inputs",
    "firstlight.engine.serving.scheduler",
    "firstlight.engine.findings",
    "firstlight.engine.errors",
    "firstlight.workbench",
    "firstlight.workbench.cli",
)
HEAVY_MODULES = (
    "torch",
    "triton",
    "transformers",
    "fastapi",
    "panel",
    "plotly",
    "ipywidgets",
    "IPython",
    "pandas",
    "ray",
)


def _package_imports() -> list[Import]:
    notebooks = [f for f in files() if f.suffix == ".ipynb"]
    return [found for file in (*python_files(*CODE_FOLDERS), *notebooks) for found in imports(file)]


def test_imports_point_one_way() -> None:
    wrong = []
    for found in _package_imports():
        parts = found.module.split(".")
        if (found.file.as_posix(), found.module) in UPWARDS:
            continue
        if parts[0] == "firstlight" and len(parts) > 1 and parts[1] not in MAY_IMPORT[found.file.parts[0]]:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", DOORS)
def test_library_has_one_door(library: str) -> None:
    wrong = [
        str(found)
        for found in _package_imports()
        if found.module.split(".")[0] == library
        and found.file.parts[0] != "notebooks"
        and not found.file.as_posix().startswith(DOORS[library])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_planning_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & set({HEAVY_MODULES!r})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert not run.stdout.split(), f"importing {module} loads {run.stdout.strip()}"


@pytest.mark.parametrize("module", ["firstlight.engine.inputs.image_constants", "firstlight.workbench.scan"])
def test_constants_of_pictures_are_read_without_numpy(module: str) -> None:
    """Only pictures need it; loading it takes as long as a scan does otherwise."""
    code = f"import sys, {module}; print(*(set(sys.modules) & {{'numpy', 'PIL', 'jinja2'}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert not run.stdout.split(), f"importing {module} loads {run.stdout.strip()}"


def test_the_walk_sees_every_kind_of_import(tmp_path: Path) -> None:
    """The rules above hold nothing if the walk overlooks an import."""
    file = tmp_path / "sample.py"
    file.write_text(
        "import a.b\nfrom c import d\ndef f():\n    import e\nimportlib.import_module('g')\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import h\nclass K:\n    import i\n"
    )
    assert sorted(found.module for found in imports(file)) == ["a.b", "c", "e", "g", "h", "i", "typing"]


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_every_module_imports(folder: str) -> None:
    """Also those that no other test reaches; a library that is an extra is imported where it is used."""
    for file in python_files(folder):
        if file.name != "__main__.py":
            assert importlib.import_module(module_name(file))
