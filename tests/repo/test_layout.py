"""The layout: what stands at the top, what an `__init__.py` may hold, and how long a file may be."""

import ast
from pathlib import Path

import pytest

from tests.repo.tree import CODE_FOLDERS, ROOT, files, imports, python_files, syntax_tree

TOP_FOLDERS = {*CODE_FOLDERS, "notebooks", "tests", "data", ".ci"}
TOP_FILES = {
    ".gitattributes",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
}
LONGEST_FILE = 500
LARGEST_FILE_BYTES = 2_000_000
WEIGHTS_OF_SAMPLES = ("data", "samples", "menagerie")
SAMPLE_BYTES = 12_000_000


def test_top_level_is_fixed() -> None:
    folders = {file.parts[0] for file in files() if len(file.parts) > 1}
    singles = {file.name for file in files() if len(file.parts) == 1}
    assert folders <= TOP_FOLDERS, f"new top-level folders: {folders - TOP_FOLDERS}"
    assert singles <= TOP_FILES, f"new top-level files: {singles - TOP_FILES}"
    assert TOP_FILES - {".gitattributes"} <= singles, f"missing: {TOP_FILES - singles}"


def test_kernels_stays_a_namespace() -> None:
    """A `kernels/__init__.py` would hide PyPI's `kernels` from whatever runs in the repository's root."""
    assert Path("kernels/__init__.py") not in files()
    assert (ROOT / "kernels").is_dir()


@pytest.mark.parametrize("file", [f for f in python_files() if f.name == "__init__.py"], ids=str)
def test_init_files_only_re_export(file: Path) -> None:
    body = syntax_tree(file).body
    assert body, f"{file} has no docstring"
    assert ast.get_docstring(syntax_tree(file)), f"{file} has no docstring"
    strangers = [f"line {node.lineno}: {ast.unparse(node)[:60]}" for node in body[1:] if not _re_exports(node)]
    assert not strangers, f"{file} holds more than re-exports: {strangers}"


def _re_exports(node: ast.stmt) -> bool:
    """Imports, also for the type checker alone; private names and `__all__`; `__getattr__`, for lazy re-exports."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING") and all(_re_exports(inner) for inner in node.body)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(name.startswith("_") for target in targets for name in ast.unparse(target).strip("()").split(", "))
    return isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")


@pytest.mark.parametrize("file", python_files(), ids=str)
def test_file_is_one_idea_long(file: Path) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE, f"{file} has {lines} lines; a file that needs a table of contents is two files"


@pytest.mark.parametrize("file", python_files(), ids=str)
def test_folders_are_imported_by_their_own_name_only(file: Path) -> None:
    """`import engine` would work in the root alone, and load everything a second time beside `firstlight.engine`."""
    wrong = [str(i) for i in imports(file) if i.module.split(".")[0] in (*CODE_FOLDERS, "data")]
    assert not wrong, wrong


def test_large_files_are_samples() -> None:
    sizes = {file: (ROOT / file).stat().st_size for file in files()}
    samples = {f: size for f, size in sizes.items() if f.parts[: len(WEIGHTS_OF_SAMPLES)] == WEIGHTS_OF_SAMPLES}
    large = {str(f): size for f, size in sizes.items() if size > LARGEST_FILE_BYTES and f not in samples}
    assert not large, f"larger than {LARGEST_FILE_BYTES} bytes: {large}"
    assert sum(samples.values()) <= SAMPLE_BYTES, f"{'/'.join(WEIGHTS_OF_SAMPLES)} holds {sum(samples.values())} bytes"
