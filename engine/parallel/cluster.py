"""Where the ranks of a mesh run: processes on one machine, processes of a launcher such as torchrun, or Ray actors.

The only file that imports ray, and only when it is asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.settings import Launch, child_environment, read_launch, talk_over

if TYPE_CHECKING:
    import torch


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: its global and local rank, and the address of the rendezvous store.

    `keeps_store`: this rank's process hosts the store. `prefix`: namespace of this world's keys in the store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    keeps_store: bool = False
    prefix: str = ""


def launched() -> Place | None:
    """This process's place if a launcher (torchrun, srun, ...) started several and this is one of them."""
    launch = read_launch()
    if launch is None or launch.world_size == 1:
        return None
    if not 0 <= launch.rank < launch.world_size:
        raise Refused(
            fatal(
                "usage",
                "the launcher gave this process a rank outside its world",
                expected=f"RANK 0 to {launch.world_size - 1}",
                found=f"RANK={launch.rank}, WORLD_SIZE={launch.world_size}",
                next="correct the launcher's environment",
            )
        )
    return _place(launch)


def place_from_environment(world_size: int) -> Place | None:
    """This process's place if a launcher started it; refused if its world size is not the mesh's."""
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
    """Makes collectives use the network interface that reaches `address`; returns its name, or None if it is unknown.

    By default gloo and NCCL use the interface that the host name resolves to, which is often loopback.
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


class Keeper:
    """A Ray actor on the host of a rank: starts the rank's process, reports whether it runs, ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with this process

    def where(self) -> tuple[str, str, int]:
        """(address of the host in Ray's cluster, its name, a port that is free on it)."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), socket.gethostname(), int(probe.getsockname()[1])

    def start(self, module: str, given: bytes, environment: dict[str, str]) -> int:
        """Run a module with this environment on top of the host's own and `given` as its input; its process id."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=child_environment(**environment),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(given)
        self._process.stdin.close()
        return self._process.pid

    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def said(self) -> str:
        """The output of the rank's process."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """Kills the process if it still runs, and discards its output."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._log.close()


class RayRanks:
    """A `Keeper` for every rank, on the nodes of a running Ray cluster.

    One placement group for each tp group, one bundle a rank, STRICT_PACK: tp stays within a node. `hosts` are names or
    addresses of nodes, each of which gets as many consecutive ranks; `("auto",)`: wherever there is room.
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[str], gpus: bool, patience_s: float = 60.0) -> None:
        ray = _ray()
        self._ray = ray
        self._groups: list[Any] = []
        self.keepers: list[Any] = []
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            wanted = _hosts_of_ranks(mesh, hosts, nodes)
            resource = {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
            _refuse_too_wide(mesh, resource, nodes)
            self._place(mesh, wanted, resource, patience_s)
            self.places = ray.get([keeper.where.remote() for keeper in self.keepers], timeout=patience_s)
        except BaseException:
            self.end()
            raise

    def _place(self, mesh: Mesh, wanted: Sequence[str | None], resource: dict[str, float], patience_s: float) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for first in range(0, mesh.world_size, mesh.tp):
            on = {f"node:{wanted[first]}": 0.001} if wanted[first] is not None else {}
            group = placement_group([{**resource, **on} for _ in range(mesh.tp)], strategy="STRICT_PACK")
            self._groups.append(group)
            if not group.wait(patience_s):
                raise _no_room(self._ray, mesh, first, resource, wanted[first])
            for index in range(mesh.tp):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                options = {
                    "num_cpus": resource["CPU"],
                    "num_gpus": resource.get("GPU", 0.0),
                    "scheduling_strategy": where,
                }
                self.keepers.append(self._ray.remote(Keeper).options(**options).remote())

    def start(self, module: str, given: bytes, gpus: bool) -> tuple[int, ...]:
        """Start every rank with a launcher's environment: rank 0 keeps the store. Their process ids."""
        address, _, port = self.places[0]
        on_host = [sum(place[0] == other[0] for other in self.places) for place in self.places]
        started = []
        for rank, keeper in enumerate(self.keepers):
            before = sum(other[0] == self.places[rank][0] for other in self.places[:rank])
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.keepers)),
                "LOCAL_RANK": "0" if gpus else str(before),  # Ray shows each rank its own device and no other
                "LOCAL_WORLD_SIZE": str(on_host[rank]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            started.append(keeper.start.remote(module, given, environment))
        return tuple(self._ray.get(started))

    def free_port(self) -> int:
        """A free port on rank 0's host."""
        return int(self._ray.get(self.keepers[0].where.remote())[2])

    def statuses(self, timeout_s: float = 5.0) -> list[int | None]:
        """The exit status of every rank: None while it runs, -9 if its keeper is lost."""
        asked = [keeper.status.remote() for keeper in self.keepers]
        found: list[int | None] = []
        for one in asked:
            try:
                found.append(self._ray.get(one, timeout=timeout_s))
            except self._ray.exceptions.GetTimeoutError:
                found.append(None)
            except self._ray.exceptions.RayError:
                found.append(-9)
        return found

    def said(self, rank: int) -> str:
        """The output of a rank's process, if it is still available."""
        try:
            return str(self._ray.get(self.keepers[rank].said.remote(), timeout=5.0))
        except self._ray.exceptions.RayError as error:
            return f"(its host does not answer: {type(error).__name__})"

    def end(self) -> None:
        """Kills all ranks."""
        exceptions = self._ray.exceptions
        for keeper in self.keepers:
            with contextlib.suppress(exceptions.RayError):
                self._ray.get(keeper.end.remote(), timeout=5.0)
            self._ray.kill(keeper)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()


def _ray() -> Any:
    """The `ray` module, connected to the running cluster."""
    try:
        import ray
    except ImportError as error:
        raise Refused(
            fatal(
                "not-available",
                "ranks on several hosts are placed by Ray, which is not installed here",
                expected="the package ray",
                found=str(error),
                next="pip install 'firstlight[ray]' on every host, or start the ranks with torchrun",
            )
        ) from error
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise Refused(
            fatal(
                "not-available",
                "this host belongs to no running Ray cluster",
                expected="ray start --head on one host, and ray start --address HOST:6379 on the others",
                found=" ".join(str(error).split())[:200],
                next="start one, or start the ranks with torchrun",
            )
        ) from error
    return ray


def _hosts_of_ranks(mesh: Mesh, hosts: Sequence[str], nodes: Sequence[dict[str, Any]]) -> list[str | None]:
    """The address of the node that each rank must run on; None: any node."""
    if tuple(hosts) == ("auto",):
        return [None] * mesh.world_size
    known: dict[str, set[str]] = {}
    for node in nodes:
        for name in _names(node):
            known.setdefault(name, set()).add(node["NodeManagerAddress"])
    missing = [host for host in hosts if len(known.get(host, ())) != 1]
    if missing:
        several = any(host in known for host in missing)
        raise Refused(
            fatal(
                "not-found",
                f"{', '.join(missing)} names {'several nodes' if several else 'no node'} of the Ray cluster",
                expected=", ".join(sorted(name for name, places in known.items() if len(places) == 1)),
                found=", ".join(missing),
                next="correct --hosts" + ("" if several else ", or start Ray there: ray start --address HOST:6379"),
            )
        )
    addresses = [next(iter(known[host])) for host in hosts]
    each, left = divmod(mesh.world_size, len(hosts))
    if left or each % mesh.tp:
        raise Refused(
            fatal(
                "usage",
                f"{mesh.describe()} does not divide over {len(hosts)} hosts with every tp group on one of them",
                expected=f"a multiple of {mesh.tp} ranks on each host",
                found=f"{mesh.world_size} ranks on {len(hosts)} hosts",
                next=f"use --tp {math.gcd(mesh.tp, each) or 1} and more --pp, or another number of hosts",
            )
        )
    return [addresses[rank // each] for rank in range(mesh.world_size)]


def _refuse_too_wide(mesh: Mesh, resource: dict[str, float], nodes: Sequence[dict[str, Any]]) -> None:
    """Refuses a tp group that is larger than any node, instead of waiting for it."""
    most = {name: max(node["Resources"].get(name, 0.0) for node in nodes) for name in resource}
    short = [name for name, count in resource.items() if most[name] < count * mesh.tp]
    if short:
        raise Refused(
            fatal(
                "does-not-fit",
                f"no node of the Ray cluster has {mesh.tp} {short[0]}s for the ranks of one tp group",
                expected=f"{mesh.tp} {short[0]}s on one node",
                found=f"at most {most[short[0]]:g}",
                next=f"use --tp {int(most[short[0]]) or 1} or less, with more --pp",
            )
        )


def _names(node: dict[str, Any]) -> set[str]:
    return {node["NodeManagerAddress"], node.get("NodeManagerHostname") or "", node.get("NodeName") or ""} - {""}


def _no_room(ray: Any, mesh: Mesh, first: int, resource: dict[str, float], host: str | None) -> Refused:
    free = ray.available_resources()
    has = ", ".join(f"{free.get(name, 0):g} {name}" for name in resource)
    return Refused(
        fatal(
            "does-not-fit",
            f"Ray has no {'node' if host is None else f'room on {host}'} for ranks {first} to {first + mesh.tp - 1} "
            "of one tp group together",
            expected=f"{mesh.tp} x ({', '.join(f'{count:g} {name}' for name, count in resource.items())}) on one node",
            found=f"{has} free in the whole cluster",
            next="use a smaller --tp with more --pp, or free what others hold (ray status)",
        )
    )
