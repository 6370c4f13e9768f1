"""`firstlight scan`."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)


run = options.not_built("scan", "it is being written")
