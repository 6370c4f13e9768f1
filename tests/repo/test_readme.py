"""README's file tree is a map: every file is on it, every entry exists, and each has a comment.

The tree is the fenced block that names `pyproject.toml`. One entry a line, indented by any number of blanks or drawn
with `├──`, `│` and `└──`: a name, two blanks or more, and the comment, with or without `#`. A folder ends in `/`. A
name may be a path, a pattern (`models/*.json`), alternatives (`{reference,triton,cases}.py`) or several of these with
commas and blanks between. A folder with no entries below it stands for all it holds.
"""

import re
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.repo.tree import ROOT, files

UNLISTED_NAMES = {"__init__.py", "py.typed", ".gitignore", ".gitattributes", ".gitkeep"}
LINE = re.compile(r"^(?P<indent>[\s│├└─|`+-]*)(?P<names>[^\s│├└─#].*?)(?:\s{2,}#?\s*|\s+#\s*)(?P<comment>\S.*)$")


class Entry(NamedTuple):
    """A pattern relative to the root (a folder's ends in `/`), its comment, and whether entries stand below it."""

    pattern: str
    comment: str
    has_children: bool

    def covers(self, file: str) -> bool:
        if not self.pattern.endswith("/"):
            return fnmatch(file, self.pattern)
        return not self.has_children and any(fnmatch(f"{p.as_posix()}/", self.pattern) for p in Path(file).parents)


def _tree_lines(readme: str) -> list[str]:
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    trees = [block for block in blocks if "pyproject.toml" in block and "engine/" in block]
    assert len(trees) == 1, "README.md needs one fenced block with the file tree"
    return [line for line in trees[0].splitlines() if line.strip(" │|")]


def _alternatives(name: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", name)
    return ["".join(chosen) for chosen in product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def parse_tree(lines: list[str]) -> list[Entry]:
    """The entries of a drawn or indented tree."""
    rows = []
    for line in lines:
        found = LINE.match(line)
        assert found, f"README.md's tree: no comment, or not an entry: {line!r}"
        names = [n for n in re.split(r"[,\s]+(?![^{]*\})", found["names"].strip()) if n]
        rows.append((len(found["indent"]), names, found["comment"]))
    entries, stack = [], []
    for number, (indent, names, comment) in enumerate(rows):
        while stack and stack[-1][0] >= indent:
            stack.pop()
        prefix = stack[-1][1] if stack else ""
        has_children = number + 1 < len(rows) and rows[number + 1][0] > indent
        for name in names:
            entries += [Entry(prefix + single, comment, has_children) for single in _alternatives(name)]
        if has_children:
            stack.append((indent, prefix + names[0]))
    return entries


def _rooted(entries: list[Entry]) -> list[Entry]:
    """Without the repository's own name, where the tree begins with it."""
    first = entries[0].pattern
    if entries[0].has_children and not (ROOT / first).is_dir() and all(e.pattern.startswith(first) for e in entries):
        return [e._replace(pattern=e.pattern.removeprefix(first)) for e in entries[1:]]
    return entries


def test_every_file_is_on_the_map_and_every_entry_exists() -> None:
    entries = _rooted(parse_tree(_tree_lines((ROOT / "README.md").read_text(encoding="utf-8"))))
    names = [file.as_posix() for file in files()]
    folders = {f"{parent.as_posix()}/" for file in files() for parent in file.parents}
    missing = [n for n in names if Path(n).name not in UNLISTED_NAMES and not any(e.covers(n) for e in entries)]
    stale = [e.pattern for e in entries if not any(fnmatch(name, e.pattern) for name in (*names, *folders))]
    assert not missing, f"not in README.md's tree: {missing}"
    assert not stale, f"in README.md's tree, but not in the repository: {stale}"


def test_trees_are_read_in_both_manners() -> None:
    drawn = [
        "firstlight/                 the root",
        "├── pyproject.toml          # one",
        "├── engine/                 # two",
        "│   ├── errors.py           # three",
        "│   └── weights/            # four",
        "└── kernels/                # five",
        "    └── */{reference,triton}.py  # six",
    ]
    indented = ["engine/   two", "  a.py, b.py   three", "  weights/   four", "kernels/*.py  five"]
    patterns = [e.pattern.removeprefix("firstlight/") for e in parse_tree(drawn)[1:]]
    assert patterns == [
        "pyproject.toml",
        "engine/",
        "engine/errors.py",
        "engine/weights/",
        "kernels/",
        "kernels/*/reference.py",
        "kernels/*/triton.py",
    ]
    assert [e.pattern for e in parse_tree(indented)] == [
        "engine/",
        "engine/a.py",
        "engine/b.py",
        "engine/weights/",
        "kernels/*.py",
    ]
    entries = parse_tree(indented)
    assert any(e.covers("engine/weights/formats/plain.py") for e in entries)
    assert not any(e.covers("engine/other.py") for e in entries)
