"""`firstlight stress`: not built yet, and it says so."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)


run = options.not_built("stress", "firstlight serve starts an engine for a load generator of your own")
