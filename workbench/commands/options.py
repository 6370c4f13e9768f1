"""Options that several verbs share, and the data they become. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, what_is
from firstlight.engine.parallel.mesh import ATTENTIONS
from firstlight.engine.parallel.rows import EXCHANGES
from firstlight.engine.settings import show_devices
from firstlight.workbench.fallback import NAMES

if TYPE_CHECKING:
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.serving.api import EngineInfo
    from firstlight.engine.serving.options import EngineOptions
    from firstlight.engine.serving.request import SamplingParams
    from firstlight.workbench.session import Session

Number = TypeVar("Number", int, float)
AXES = {
    "tp": "tensor parallel: heads, feed-forward width and vocabulary divided over N ranks",
    "pp": "pipeline parallel: layers divided over N stages",
    "ep": "expert parallel: experts divided over N ranks",
    "sp": "sequence parallel: the tokens of prefill divided over N ranks, for models of attention alone",
    "dp": "N replicas, each with its own requests",
}
DTYPES = {
    "auto": "auto",
    "bf16": "BF16", "bfloat16": "BF16",
    "f16": "F16", "fp16": "F16", "float16": "F16", "half": "F16",
    "f32": "F32", "fp32": "F32", "float32": "F32",
}  # fmt: skip
BACKEND_DEVICES = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}


def checkpoint(parser: argparse.ArgumentParser, may_lack: bool = False) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        nargs="?" if may_lack else None,
        help="directory of a checkpoint, or its URL: s3://, gs://, az://, http(s)://",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="of a URL: keep the weights that are read in the cache, to read them again, or go on, from there",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        metavar="SECONDS",
        help="of a URL: how long its server is asked again while no byte comes (default 8)",
    )

    fallback(parser)


def fallback(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("architectures")
    group.add_argument(
        "--fallback",
        choices=("never", "auto", "always"),
        default="auto",
        help="run what no family here knows in the reference's own modules, on one rank (auto), or everything (always)",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="let the reference run code that the checkpoint brings"
    )


def say_fallback(session: Session, info: EngineInfo) -> None:
    """A line on standard error where the reference computes instead of a family of ours; not to be overlooked."""
    for finding in info.findings:
        if finding.code == "fallback":
            session.face.aside(f"FALLBACK: {finding.message}")


def mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mesh")
    for axis, text in AXES.items():
        group.add_argument(f"--{axis}", type=positive, metavar="N", help=text)
    group.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="divided",
        help="of every token mixer: heads divided over tp, or whole on each rank, so that any number of heads will do",
    )


def expert_exchange(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--expert-exchange",
        choices=EXCHANGES,
        default="auto",
        help="tokens of other ep ranks' experts: summed over ranks, sent to them, or by the size of a step (auto)",
    )


def engine(parser: argparse.ArgumentParser) -> None:
    """Everything an engine is started with."""
    mesh(parser)
    group = parser.add_argument_group("engine")
    _device(group)
    _limits(group)
    _weights(group)
    group.add_argument(
        "--hosts",
        metavar="A,B",
        type=hosts,
        help="nodes of a Ray cluster for the ranks, a cluster file that names them, or auto (default: this machine)",
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of all ranks together (default: one a core)"
    )
    group.add_argument(
        "--operator", action="append", metavar="OP=NAME", type=operator, help="force an implementation of an operator"
    )


def _device(group: argparse._ArgumentGroup) -> None:
    """What ranks compute on, and in which numbers."""
    group.add_argument(
        "--dtype", type=dtype, metavar="D", default="auto", help="auto (the checkpoint's), bf16, f16, f32"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute")
    group.add_argument("--backend", choices=tuple(BACKEND_DEVICES), default="auto", help="gloo for CPUs, nccl for GPUs")
    group.add_argument("--device-ids", metavar="I,J", type=device_ids, help="the GPUs to use, by number")


def _limits(group: argparse._ArgumentGroup) -> None:
    """How much is computed at once, and kept."""
    group.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help="tokens of prompt and answer of one sequence (default: the model's, at most 2048 on CPUs, 32768 on GPUs)",
    )
    group.add_argument("--max-batch", type=positive, metavar="N", default=8, help="sequences at once per replica")
    group.add_argument(
        "--token-budget", type=positive, metavar="N", help="most tokens of one step, prompts and answers together"
    )
    group.add_argument("--page-size", type=positive, metavar="N", help="tokens of a page of the cache")
    group.add_argument("--num-pages", type=positive, metavar="N", help="pages of the cache per replica")


def _weights(group: argparse._ArgumentGroup) -> None:
    """Which weights are in memory, and how."""
    group.add_argument(
        "--residency",
        choices=("resident", "streamed", "experts"),
        default="resident",
        help="all weights in memory; layers that follow one another, read ahead; experts read when tokens choose them",
    )
    group.add_argument(
        "--weights-budget",
        type=nbytes,
        metavar="BYTES",
        help="memory of a rank for weights, as 8GiB: for those that come and go or, where all are resident, a limit "
        "for which quantized ones stay packed (--packed auto), and beyond which the start is refused",
    )
    expert_exchange(group)
    group.add_argument(
        "--packed",
        choices=("auto", "always", "never"),
        default="auto",
        help="keep quantized weights packed where an operator multiplies by them so; auto: on CPUs experts, and linear "
        "layers in codes that are multiplied by faster than plain numbers, or all where the rest has no room unpacked",
    )


def prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="what to ask")
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="a picture; may be given several times"
    )


def sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument("--max-new-tokens", type=positive, metavar="N", default=128, help="longest answer")
    group.add_argument(
        "--temperature", type=float, metavar="T", default=0.0, help="0 takes the likeliest token (default)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", default=1.0, help="sample from the likeliest P of probability"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", default=0, help="sample from the K likeliest tokens; 0: from all"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at an end-of-sequence token")


def refuse_absent_directory(checkpoint: str, holds: str) -> None:
    """Says that there is no such directory, before anything is made for it, or one of its files is said to be missing.

    `holds`: a file by which the right one is known.
    """
    if (what := what_is(Path(checkpoint).expanduser())) != "a directory":
        raise Refused(
            fatal(
                "not-found",
                f"{checkpoint} is not a checkpoint directory",
                file=checkpoint,
                expected=f"a directory with {holds} and what lies beside it",
                found=what,
                next=f"name the directory that holds {holds}",
            )
        )


def refuse_absent_pictures(images: list[str]) -> None:
    """Says that a picture is not there before anything is loaded for it."""
    for image in images:
        if not image.startswith("data:") and "://" not in image and (what := what_is(image)) != "a file":
            raise Refused(
                fatal(
                    "not-found",
                    f"the picture {image} is {'not there' if what == 'nothing of that name' else 'no file'}",
                    file=image,
                    expected="an image file",
                    found=what,
                    next="correct --image",
                )
            )


def mesh_of(arguments: argparse.Namespace) -> Mesh:
    from firstlight.engine.parallel.mesh import Mesh

    sizes: dict[str, Any] = {axis: getattr(arguments, axis) or 1 for axis in AXES}
    return Mesh(**sizes, attention=arguments.attention)


def has_mesh(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, axis) is not None for axis in AXES)


def options_of(arguments: argparse.Namespace, **changes: Any) -> EngineOptions:
    """The engine's options as asked for on the command line."""
    from firstlight.engine.serving.options import EngineOptions

    values = {
        "checkpoint": arguments.checkpoint,
        "mesh": mesh_of(arguments),
        "device": devices_of(arguments),
        "dtype": arguments.dtype,
        "max_context": arguments.max_context,
        "max_batch": arguments.max_batch,
        "token_budget": arguments.token_budget,
        "page_size": arguments.page_size,
        "num_pages": arguments.num_pages,
        "threads": arguments.threads,
        "residency": arguments.residency,
        "weights_budget": arguments.weights_budget,
        "packed": arguments.packed,
        "expert_exchange": arguments.expert_exchange,
        "hosts": tuple(arguments.hosts or ()),
        "operators": dict(arguments.operator or ()),
        "fallback": NAMES[arguments.fallback],
        "trust_remote_code": arguments.trust_remote_code,
    }
    return EngineOptions(**{**values, **changes})


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    from firstlight.engine.serving.request import SamplingParams

    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def device_of(arguments: argparse.Namespace) -> str:
    device: str = arguments.device
    wanted = BACKEND_DEVICES[arguments.backend]
    if "auto" not in (device, wanted) and device != wanted:
        raise Refused(
            fatal(
                "usage",
                f"--backend {arguments.backend} does not go with --device {device}",
                expected="gloo with cpu, or nccl with cuda",
                found=f"{arguments.backend} with {device}",
                next="leave one of the two out",
            )
        )
    return wanted if device == "auto" else device


def devices_of(arguments: argparse.Namespace) -> str:
    """Where to compute; this process and the ranks it starts see the GPUs asked for, and no others.

    To be called before torch looks at them. Who names GPUs does not want a CPU.
    """
    device = device_of(arguments)
    if not arguments.device_ids:
        return device
    if device == "cpu":
        raise Refused(
            fatal(
                "usage",
                "device ids name GPUs, but the engine is to compute on the CPU",
                expected="--device cuda, or no --device-ids",
                found=f"--device-ids {','.join(map(str, arguments.device_ids))} with the CPU",
                next="leave one of the two out",
            )
        )
    show_devices(arguments.device_ids)
    return "cuda"


def _number(convert: Callable[[str], Number], text: str, is_right: Callable[[Number], bool], what: str) -> Number:
    """The number that a text is, if it is the right one; NaN never is."""
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _number(int, text, lambda value: value >= 1, "a whole number of at least 1")


def port(text: str) -> int:
    """A number of a port."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def hosts(text: str) -> tuple[str, ...]:
    """`a,b`, or what a cluster file calls `hosts`."""
    if text.endswith((".yaml", ".yml")):
        from firstlight.engine.parallel.hardware import hosts_of

        return hosts_of(text)
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different hosts such as a,b")
    return names


def deadline(text: str) -> float:
    """A time of at least a second, which is twice the period in which ranks show that they live."""
    return _number(float, text, lambda value: 1 <= value < float("inf"), "a number of seconds of at least 1")


def nbytes(text: str) -> int:
    """A number of bytes: 1000000, 8GB, 1.5GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B?)", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 8GiB")
    power = " KMGT".index(found[2].upper()) if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def tolerance(text: str) -> float:
    """A limit on an error: more than 0, less than 1; anything passes, or nothing, under another."""
    return _number(float, text, lambda value: 0 < value < 1, "a number between 0 and 1")


def seconds(text: str) -> float:
    """A time of at most a day."""
    return _number(float, text, lambda value: 0 <= value <= 86400, "a number of seconds from 0 to 86400")


def share(text: str) -> float:
    """A part of a whole: 0 or more, less than 1."""
    return _number(float, text, lambda value: 0 <= value < 1, "a number from 0 to less than 1")


def dtype(text: str) -> str:
    """A dtype by any of its usual names."""
    if text.lower() not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, bf16, f16, f32")
    return DTYPES[text.lower()]


def device_ids(text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of device numbers such as 0,1")
    return tuple(int(part) for part in parts)


def operator(text: str) -> tuple[str, str]:
    """`attention=reference` and the like."""
    name, sign, implementation = text.partition("=")
    if not sign or not name or not implementation:
        raise argparse.ArgumentTypeError(f"{text!r} is not OPERATOR=IMPLEMENTATION")
    return name, implementation
