"""Environment variables are read in one file."""

import ast

from tests.repo.tree import CODE_FOLDERS, ROOT, python_files, syntax_tree

READER = "engine/settings.py"
READS = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "environ", "getenv"}


def test_environment_is_read_in_one_file() -> None:
    wrong = []
    for file in python_files(*CODE_FOLDERS):
        if file.as_posix() == READER:
            continue
        for node in ast.walk(syntax_tree(file)):
            if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in READS:
                wrong.append(f"{file}:{node.lineno} uses {ast.unparse(node)}")
    assert not wrong, f"read the environment in {READER} alone:\n" + "\n".join(wrong)


def test_the_reader_exists() -> None:
    assert (ROOT / READER).is_file()
