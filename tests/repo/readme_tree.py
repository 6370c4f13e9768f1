"""Writes README's file tree anew: comments of Python files are their docstrings, others keep what README says.

Run it as `python -m tests.repo.readme_tree` after files came or went.
"""

import ast
import re
from pathlib import Path

from tests.repo.test_readme import UNLISTED_NAMES
from tests.repo.tree import ROOT, files

GROUPS = {  # files that one line stands for
    "data/models/*.json": "configurations of released models without their weights, with sources",
    "data/samples/menagerie/": "the sample model: a small vision-language model of our own, as transformers writes it",
    "data/samples/pictures/": "pictures of animals to ask it about, rendered by the training script",
    "notebooks/pictures/": "pictures that this page shows",
    "dashboards/pictures/": "its tabs, as they look on a real run",
    "tests/fuzz/corpus/": "inputs that reached new code, and those that once found a fault, by what they are read as",
}
WIDTH = 120
FENCE = re.compile(r"(?<=\n```text\n).*?(?=\n```)", re.DOTALL)


def tree() -> str:
    """The tree as text, folders first, one line an entry."""
    old = _old_comments()
    names = [f.as_posix() for f in files() if f.name not in UNLISTED_NAMES]
    names = [name for name in names if not any(_stands_for(group, name) for group in GROUPS)]
    lines: list[str] = []
    _folder("", sorted([*names, *GROUPS]), old, lines)
    return "\n".join(lines)


def _stands_for(group: str, name: str) -> bool:
    return name.startswith(group) if group.endswith("/") else Path(name).match(group)


def _folder(prefix: str, names: list[str], old: dict[str, str], lines: list[str]) -> None:
    here = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    depth = prefix.count("/")
    folders = sorted({name.split("/")[0] for name in here if "/" in name.removesuffix("/")} - {"models"})
    for folder in folders:
        path = f"{prefix}{folder}/"
        lines.append(_line(depth, f"{folder}/", old.get(path) or _docstring(ROOT / path / "__init__.py")))
        _folder(path, names, old, lines)
    for name in sorted(n for n in here if "/" not in n.removesuffix("/") or n.startswith("models/")):
        path = prefix + name
        comment = GROUPS.get(path) or _docstring(ROOT / path) or old.get(path, "")
        lines.append(_line(depth, name, comment))


def _line(depth: int, name: str, comment: str) -> str:
    start = f"{'  ' * depth}{name}"
    room = WIDTH - max(len(start), 34) - 2
    words = re.sub(r"\s+", " ", comment).strip().rstrip(".") or "?"
    while len(words) > room and (shorter := _without_last_clause(words)) != words:
        words = shorter
    return f"{start:<34}  {words}"


def _without_last_clause(words: str) -> str:
    """Up to the last comma, colon, semicolon or `and`: a sentence that is too long loses its end, not its grammar."""
    return re.sub(r"(.+)(?:[,:;]| and | that | which | so that ).*", r"\1", words).rstrip(",;: ")


def _docstring(path: Path) -> str:
    """The first sentence of a module's docstring; nothing for other files."""
    if path.suffix != ".py" or not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].split(". ")[0]


def _old_comments() -> dict[str, str]:
    """Comments of the present tree by path."""
    found = FENCE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    comments: dict[str, str] = {}
    stack: list[str] = []
    for line in found[0].splitlines() if found else ():
        depth = (len(line) - len(line.lstrip(" "))) // 2
        name, _, comment = line.strip().partition("  ")
        stack[depth:] = [name]
        comments["".join(stack)] = comment.strip().rstrip("…").strip()
    return comments


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(FENCE.sub(lambda _: tree(), text, count=1), encoding="utf-8")
