"""Ranks the layouts of a model on a cluster by latency, throughput or device count, with the reasons. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from firstlight.engine.parallel.estimate import Roofline, StepTime, bytes_read
from firstlight.engine.parallel.layouts import Layouts, Objective, Shape
from firstlight.engine.parallel.mesh import Mesh

PREFILL_TOKENS = 4096  # of the step whose time is estimated
MOST_AT_ONCE = 256  # sequences a replica, where throughput is asked for and nobody said how many
DEEPER = (1, 2, 4)  # times the fewest pipeline stages that fit: more stages make room for more sequences


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One layout: `concurrency` sequences at once over all replicas, the steps of one replica, the fullest rank."""

    mesh: Mesh
    concurrency: int
    prefill: StepTime
    decode: StepTime
    largest_bytes: int

    @property
    def devices(self) -> int:
        return self.mesh.world_size

    @property
    def ms_per_token(self) -> float | None:
        """Decode time per token of one sequence, at the planned concurrency."""
        return self.decode.step_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate of all replicas together."""
        step_ms = self.decode.step_ms
        return None if step_ms is None else self.concurrency / step_ms * 1000


class Ranker:
    """Estimates layouts; `concurrency` None: 1, or for throughput as many as fit."""

    def __init__(self, layouts: Layouts, roofline: Roofline, concurrency: int | None) -> None:
        self.layouts, self.roofline, self.concurrency = layouts, roofline, concurrency

    def ranked(self, objective: Objective) -> tuple[Candidate, ...]:
        """Layouts that fit the cluster, best first; empty if facts that the estimate needs are missing.

        latency: least ms per token of decode. throughput: most tokens/s of the whole cluster. devices: fewest devices.
        Ties go to the faster, then to fewer devices, then to fewer axes.
        """
        found = [one for one in self._candidates(objective) if one.ms_per_token is not None]
        return tuple(sorted(found, key=lambda one: _order(one, objective)))

    def candidate(self, mesh: Mesh, concurrency: int) -> Candidate:
        """Estimated time and memory of one layout."""
        layouts = self.layouts
        sequences = -(-concurrency // mesh.dp)
        prompt = min(PREFILL_TOKENS, layouts.context)
        weights = layouts.read_weights(mesh.tp, mesh.ep)
        cache = layouts.cache_bytes(mesh.tp) * sequences
        spec = layouts.spec
        return Candidate(
            mesh=mesh,
            concurrency=concurrency,
            prefill=self.roofline.step(mesh, "prefill", prompt, bytes_read(spec, weights, 0, prompt)),
            decode=self.roofline.step(mesh, "decode", sequences, bytes_read(spec, weights, cache, sequences)),
            largest_bytes=layouts.largest((mesh.tp, mesh.ep, mesh.pp), sequences),
        )

    def _candidates(self, objective: Objective) -> Iterator[Candidate]:
        count = self.layouts.cluster.count
        for tp in self.layouts.widths:
            for ep in self.layouts.experts:
                if tp * ep > count:
                    continue
                for shape in self._depths(tp, ep):
                    yield from self._replicas(shape, objective)

    def _depths(self, tp: int, ep: int) -> Iterator[Shape]:
        """Shapes by number of pipeline stages: from the fewest that hold one sequence to more than hold all."""
        count, layers = self.layouts.cluster.count, self.layouts.spec.most_stages
        least = self.layouts.shallowest(tp, ep, 1)
        if least is None:
            return
        enough = self.layouts.shallowest(tp, ep, self.concurrency or 1) or least
        for pp in sorted({least * times for times in DEEPER} | set(range(least, enough + 1))):
            if pp <= layers and tp * ep * pp <= count:
                yield tp, ep, pp

    def _replicas(self, shape: Shape, objective: Objective) -> Iterator[Candidate]:
        most = self.layouts.cluster.count // math.prod(shape)
        room = self.layouts.most_sequences(shape, max(MOST_AT_ONCE, self.concurrency or 1))
        if not room:
            return
        if self.concurrency is None and objective == "throughput":
            yield self.candidate(self.layouts.mesh(shape, most), most * min(room, MOST_AT_ONCE))
            return
        wanted = self.concurrency or 1
        least = -(-wanted // room)  # replicas that have room for all
        counts = {least} if objective == "devices" else {least, min(most, wanted)}
        for dp in sorted(counts):
            if least <= dp <= most:
                yield self.candidate(self.layouts.mesh(shape, dp), wanted)


def _order(one: Candidate, objective: Objective) -> tuple[float, ...]:
    slowest = (one.ms_per_token or math.inf, one.devices, one.mesh.pp, one.mesh.ep, one.mesh.dp)
    if objective == "throughput":
        return (-(one.tokens_per_s or 0.0), one.devices, *slowest)
    return (one.devices, *slowest) if objective == "devices" else slowest


def reason(one: Candidate, best: Candidate, objective: Objective) -> str:
    """Why a layout is ranked where it is, in words."""
    decode = one.decode
    parts = f"memory {decode.memory_ms:.3g} ms, compute {decode.compute_ms:.3g}, communication "
    parts += f"{decode.communication_ms:.3g}; bound by {decode.bound_by}"
    if one == best:
        lead = {"latency": "least ms per token", "throughput": "most tokens/s", "devices": "fewest devices"}[objective]
        return f"{lead}: {parts}"
    assert one.ms_per_token
    assert best.ms_per_token
    if objective == "devices" and one.devices > best.devices:
        return f"{one.devices - best.devices} devices more: {parts}"
    if objective == "throughput":
        assert one.tokens_per_s
        assert best.tokens_per_s
        less = 1 - one.tokens_per_s / best.tokens_per_s
        return f"{100 * less:.0f} % fewer tokens/s: {parts}" if less >= 0.005 else f"as many tokens/s: {parts}"
    more = one.ms_per_token / best.ms_per_token - 1
    return f"{100 * more:.0f} % longer a token: {parts}" if more >= 0.005 else f"as fast: {parts}"


def shown(ranking: Sequence[Candidate], most: int = 12) -> tuple[Candidate, ...]:
    """The top of a ranking, each replica shape once."""
    seen: dict[Shape, Candidate] = {}
    for one in ranking:
        seen.setdefault((one.mesh.tp, one.mesh.ep, one.mesh.pp), one)
    return tuple(seen.values())[:most]
