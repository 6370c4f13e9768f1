"""Names the packages of the wheel by reading the tree; everything else is in pyproject.toml.

Setuptools can map a folder to another import name but cannot discover packages through such a mapping, and a list kept
by hand would be forgotten with the first new operator. A package is any folder that holds Python files.
"""

from pathlib import Path

from setuptools import setup

CODE_FOLDERS = ("engine", "kernels", "workbench", "dashboards")

folders = {Path(code) for code in CODE_FOLDERS}
folders |= {file.parent for code in CODE_FOLDERS for file in Path(code).rglob("*.py")}
setup(packages=["firstlight.data", *sorted(".".join(("firstlight", *folder.parts)) for folder in folders)])
