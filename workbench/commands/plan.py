"""`firstlight plan`: does it fit, on how many devices, and what decides."""

from __future__ import annotations

import argparse

from firstlight.workbench.commands import options
from firstlight.workbench.report import Report
from firstlight.workbench.session import Session

OBJECTIVES = ("latency", "throughput", "devices")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CKPT|FACTS", help="directory of a checkpoint, a config.json, or a name in data/models"
    )
    parser.add_argument(
        "--cluster", metavar="C", help="[NODESx]COUNTxDEVICE, e.g. 8xH200 or 2x8xB200, or a YAML file (default: here)"
    )
    parser.add_argument("--context", type=options.positive, metavar="N", help="tokens of one sequence (default 4096)")
    parser.add_argument(
        "--concurrency", type=options.positive, metavar="N", help="sequences at once (default 1; throughput: what fits)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, default="latency", help="what to lay out for without a mesh")
    parser.add_argument("--cache-dtype", type=options.dtype, metavar="D", default="BF16", help="dtype of the cache")
    parser.add_argument("--headroom", type=options.share, metavar="F", default=0.15, help="part of memory left free")
    options.expert_exchange(parser)
    options.fallback(parser)
    options.mesh(parser)


def run(arguments: argparse.Namespace, session: Session) -> Report:
    from firstlight.engine.parallel.hardware import parse_cluster
    from firstlight.workbench.here import this_cluster
    from firstlight.workbench.plan import plan

    mesh = options.mesh_of(arguments) if options.has_mesh(arguments) else None
    ranks = mesh.world_size if mesh is not None else 1
    return plan(
        arguments.checkpoint,
        parse_cluster(arguments.cluster) if arguments.cluster is not None else this_cluster(ranks),
        mesh,
        context=arguments.context,
        concurrency=arguments.concurrency,
        cache_dtype="BF16" if arguments.cache_dtype == "auto" else arguments.cache_dtype,
        headroom=arguments.headroom,
        objective=arguments.objective,
        exchange=arguments.expert_exchange,
        attention=arguments.attention,
    )
