"""The only file that reads environment variables: ours (FIRSTLIGHT_*), a launcher's, the system's.

Nothing is read at import; call the functions. No torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.kernels.native.library import user_cache

VARIABLES: dict[str, str] = {
    "FIRSTLIGHT_CACHE": "folder for what can be made again (default: firstlight in $XDG_CACHE_HOME or ~/.cache)",
    "FIRSTLIGHT_RUNTIME": "folder for the files of engine hosts (default: in $XDG_RUNTIME_DIR or the temporary one)",
    "FIRSTLIGHT_TOKEN": "bearer token of an engine host, where none is given otherwise",
    "FIRSTLIGHT_THREADS": "CPU threads of all local ranks together (default: the cores this process may use)",
}

# A thread that spins keeps the processor from the one it waits for, where more run than there are processors. Decoding
# of SmolLM2 by two threads on two cores, in tokens a second on a quiet machine and beside one or two busy processes:
# 300,000 turns (what libgomp takes) 91, 10, 8; 3,000 turns 88, 21, 24; 1,000 turns 84, 45, 40; none 51, 67, 68.
SPINS = 1000
SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment says: see `VARIABLES` for each."""

    cache_dir: Path
    runtime_dir: Path
    token: str | None = None
    threads: int
    triton_interpret: bool = False


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a launcher such as torchrun put this process.

    `has_store`: the launcher itself holds the store that ranks meet at. `attempt` counts how often it began anew.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    has_store: bool
    attempt: int = 0


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The current settings; an unknown FIRSTLIGHT_ variable or a bad value is refused (usage)."""
    env = os.environ if environment is None else environment
    unknown = sorted(name for name in env if name.startswith("FIRSTLIGHT_") and name not in VARIABLES)
    if unknown:
        raise Refused(
            fatal(
                "usage",
                f"the environment sets {', '.join(unknown)}, which nothing reads",
                expected=", ".join(VARIABLES),
                next="unset it or correct its name",
            )
        )
    runtime = Path(env.get("XDG_RUNTIME_DIR") or Path(tempfile.gettempdir()) / f"firstlight-{os.getuid()}")
    return Settings(
        cache_dir=Path(env.get("FIRSTLIGHT_CACHE") or user_cache(env.get("XDG_CACHE_HOME"))),
        runtime_dir=Path(env.get("FIRSTLIGHT_RUNTIME") or runtime / "firstlight"),
        token=env.get("FIRSTLIGHT_TOKEN") or None,
        threads=_number(env, "FIRSTLIGHT_THREADS", len(os.sched_getaffinity(0))),
        triton_interpret=env.get("TRITON_INTERPRET", "0") not in ("", "0"),
    )


def read_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """This process's place if a launcher set RANK and WORLD_SIZE (as torchrun does), else None."""
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", rank),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", 29500),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def bad_endpoints() -> dict[str, str]:
    """Endpoint variables of object stores that hold no valid address; the library would abort this process."""
    names = [f"{who}ENDPOINT{url}" for who in ("AWS_", "AZURE_", "AZURE_STORAGE_") for url in ("", "_URL", "_URL_S3")]
    return {
        name: value
        for name in names
        if (value := os.environ.get(name)) and not re.fullmatch(r"https?://[\w.:\[\]-]+(/\S*)?", value)
    }


def talk_over(interface: str) -> None:
    """Makes gloo and NCCL use this network interface, unless the environment already names one."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)


def is_one_of_many() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    launch = read_launch()
    return launch is not None and launch.world_size > 1


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a process we start: this one's, with `changes`; its threads do not wait in vain for long."""
    return {**_waiting(os.environ), **os.environ, **changes}


def wait_briefly() -> None:
    """Has threads of this process spin only shortly while they wait for others; call it before torch is imported."""
    os.environ.update(_waiting(os.environ))


def _waiting(env: Mapping[str, str]) -> dict[str, str]:
    """How long threads of OpenMP spin (`SPINS`), unless the environment says that itself."""
    return {} if any(name in env for name in SPIN_VARIABLES) else {"GOMP_SPINCOUNT": str(SPINS)}


def show_devices(ids: Sequence[int]) -> None:
    """Lets this process and those it starts see these GPUs and no others; call it before torch looks at them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise Refused(
            fatal(
                "usage",
                f"the environment variable {name} is not a number",
                expected="an integer",
                found=text,
                next=f"correct {name}, or unset it",
            )
        )
    return int(text)
