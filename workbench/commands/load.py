"""`firstlight load`: the weights of every rank, and nothing else."""

from __future__ import annotations

import argparse

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, note
from firstlight.workbench.arguments import stated
from firstlight.workbench.commands import options
from firstlight.workbench.commands.verify import layers
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session

UNUSED = (
    "residency",
    "weights_budget",
    "operator",
    "max_context",
    "max_batch",
    "token_budget",
    "page_size",
    "num_pages",
    "threads",
    "expert_exchange",
)  # options of engines that loading alone has no use for


def arguments(parser: argparse.ArgumentParser) -> None:
    options.checkpoint(parser)
    options.engine(parser)
    group = parser.add_argument_group("loading")
    group.add_argument("--hash", action="store_true", help="also the SHA-256 of every parameter as it is in memory")
    group.add_argument("--reader", choices=("auto", "buffered", "direct"), default="auto", help="how files are read")
    group.add_argument("--load-threads", type=options.positive, metavar="N", help="reads in flight")
    group.add_argument("--no-limit", action="store_true", help="do not measure what the source gives at best")
    alone = parser.add_argument_group("one rank of the mesh, whatever its size")
    alone.add_argument("--rank", type=int, metavar="R", help="account for its share, and read some layers")
    alone.add_argument("--layers", metavar="A:B", type=layers, help="layers A up to, not including, B; with --rank")
    alone.add_argument("--forward", action="store_true", help="run them once, the other ranks left out; with --rank")


def run(arguments: argparse.Namespace, session: Session) -> Report:
    mesh = options.mesh_of(arguments)
    _refuse_elsewhere(arguments)
    if arguments.rank is not None:
        from firstlight.workbench.one_rank import one_rank

        report = one_rank(
            arguments.checkpoint,
            mesh,
            arguments.rank,
            arguments.layers,
            forward=arguments.forward,
            dtype=arguments.dtype,
            threads=arguments.load_threads,
            packed=arguments.packed,
            progress=session.progress("load"),
        )
        return _with_unused(report, arguments)
    from firstlight.workbench.load import load

    report = load(
        arguments.checkpoint,
        mesh,
        dtype=arguments.dtype,
        device=options.devices_of(arguments),
        threads=arguments.load_threads,
        reader=arguments.reader,
        hashes=arguments.hash,
        limit=not arguments.no_limit,
        packed=arguments.packed,
        progress=session.progress("load"),
    )
    return _with_unused(report, arguments)


def _refuse_elsewhere(arguments: argparse.Namespace) -> None:
    """Other hosts read nothing for `load`, and without a rank there are no layers of one."""
    if arguments.hosts is not None:
        raise Refused(
            fatal(
                "usage",
                "load reads on this machine alone, not on other hosts",
                expected="no --hosts",
                found=f"--hosts {','.join(arguments.hosts)}",
                next="leave --hosts out, or start load on every host through a launcher (torchrun)",
            )
        )
    if arguments.rank is None and (arguments.layers is not None or arguments.forward):
        raise Refused(
            fatal(
                "usage",
                "--layers and --forward are of one rank",
                expected="--rank R",
                found="no rank",
                next="add --rank",
            )
        )


def _with_unused(report: Report, arguments: argparse.Namespace) -> Report:
    """Says which options of engines were asked for in vain: nothing computes here, and nothing comes and goes."""
    unused = [f"--{name.replace('_', '-')}" for name in UNUSED if name in stated("load", arguments.words)]
    if not unused:
        return report
    said = note(
        "usage",
        f"{', '.join(unused)} made no difference: load reads all weights once and computes nothing",
        expected="verbs that compute",
        found="load",
        next="use generate, verify, serve or up, which report what came and went",
    )
    return msgspec.structs.replace(report, findings=(*report.findings, said))
