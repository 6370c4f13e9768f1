"""The repository as its tests see it: files, syntax trees and imports."""

import ast
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("engine", "kernels", "workbench", "dashboards")


class Import(NamedTuple):
    """One imported module name and where it stands."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def files() -> tuple[Path, ...]:
    """Paths relative to the root of every file that is tracked, or would be by `git add .`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(sorted({Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()}))


def python_files(*folders: str) -> tuple[Path, ...]:
    """The Python files under the folders, or all of them."""
    return tuple(f for f in files() if f.suffix == ".py" and (not folders or f.parts[0] in folders))


@cache
def syntax_tree(file: Path) -> ast.Module:
    """The file's syntax tree; of a notebook, that of its code cells joined, without magics."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).split("\n")]
        text = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    return ast.parse(text, filename=str(file))


def module_name(file: Path) -> str:
    """`engine/weights/ledger.py` -> `firstlight.engine.weights.ledger`."""
    parts = file.with_suffix("").parts
    return ".".join(("firstlight", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def imports(file: Path) -> tuple[Import, ...]:
    """Everything the file imports: also inside functions, for the type checker, and by `import_module("...")`."""
    nodes = ast.walk(syntax_tree(file))
    return tuple(Import(file, getattr(node, "lineno", 0), name) for node in nodes for name in _imported(file, node))


def _imported(file: Path, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    if isinstance(node, ast.ImportFrom):
        package = module_name(file).split(".")
        package = package if file.name == "__init__.py" else package[:-1]
        return [".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []
