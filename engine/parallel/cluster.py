"""Where the ranks of a mesh run: processes of one machine, or those that a launcher (torchrun) started on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.settings import read_launch

if TYPE_CHECKING:
    import torch


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place: its number, its number on its machine, and where the store is that all ranks meet at.

    `keeps_store`: this rank's process is where the store is.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    keeps_store: bool = False


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
                next="make the product of --tp, --pp, --ep and --dp equal to the number of processes",
            )
        )
    return Place(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        address=launch.address,
        port=launch.port,
        keeps_store=launch.rank == 0 and not launch.has_store,
    )


def backend_of(device: torch.device) -> str:
    """The library that moves tensors between ranks on this kind of device."""
    return "nccl" if device.type == "cuda" else "gloo"
