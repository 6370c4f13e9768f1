"""`firstlight load`."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)


run = options.not_built("load", "it is being written")
