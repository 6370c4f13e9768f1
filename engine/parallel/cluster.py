"""Where the ranks of a mesh run: processes of one machine, or those that a launcher (torchrun) started on several."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import psutil

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.settings import Launch, read_launch, talk_over

if TYPE_CHECKING:
    import torch


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place: its number, its number on its machine, and where the store is that all ranks meet at.

    `keeps_store`: this rank's process is where the store is. `prefix` tells apart what meets at the same store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    keeps_store: bool = False
    prefix: str = ""

    @property
    def has_company(self) -> bool:
        """Whether there are ranks on other machines."""
        return self.local_world_size < self.world_size


def launched() -> Place | None:
    """This process's place if a launcher (torchrun, srun, ...) started several and this is one of them."""
    launch = read_launch()
    if launch is None or launch.world_size == 1:
        return None
    if not 0 <= launch.rank < launch.world_size:
        raise Refused(
            fatal(
                "usage",
                "the launcher gave this process a rank that its world does not have",
                expected=f"RANK 0 to {launch.world_size - 1}",
                found=f"RANK={launch.rank}, WORLD_SIZE={launch.world_size}",
                next="correct the launcher's environment",
            )
        )
    return _place(launch)


def place_from_environment(world_size: int) -> Place | None:
    """This process's place if a launcher started it; a world of another size than the mesh is `Refused`."""
    launch = read_launch()
    if launch is None:
        return None
    if launch.world_size != world_size:
        raise Refused(
            fatal(
                "usage",
                "the launcher started another number of processes than the mesh has ranks",
                expected=f"{world_size} processes",
                found=f"WORLD_SIZE={launch.world_size}",
                next="make the product of --tp, --pp, --ep, --sp and --dp equal to the number of processes",
            )
        )
    return _place(launch)


def _place(launch: Launch) -> Place:
    return Place(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        address=launch.address,
        port=launch.port,
        keeps_store=launch.rank == 0 and not launch.has_store,
        prefix=f"attempt {launch.attempt}",
    )


def use_route_to(address: str, port: int) -> str | None:
    """Has collectives use the interface that reaches `address`, and says which; None if that cannot be found out.

    Left to themselves, gloo and NCCL take what the machine's own name resolves to, which is often loopback.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: nothing is sent
            mine = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == mine for one in addresses):
            talk_over(interface)
            return interface
    return None


def backend_of(device: torch.device) -> str:
    """The library that moves tensors between ranks on this kind of device."""
    return "nccl" if device.type == "cuda" else "gloo"
