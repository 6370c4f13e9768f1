"""When each expert will be wanted again, as far as what tokens chose so far tells: the last of them leaves first.

Layers come in turn, round and round, and a layer's turn tells which of its experts were wanted. Of an expert that is
wanted with probability p whenever its layer has a turn, the next use is (1 / p - 1) rounds behind the layer's next
turn. So where every expert is always wanted the one used last leaves, as is best then (L. A. Belady, "A study of
replacement algorithms for a virtual-storage computer", 1966), and where some are chosen more often than others, those
stay. Whoever evicts the one that was not used for longest finds nothing again where a round wants more than fits.

Legend: S sites, E experts of the site with the most, C slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

KEEP_USES = 1 - 1 / 64  # of the memory of what was chosen, from one turn of a site to the next
KEEP_AGAIN = 1 - 1 / 32  # of that of how many experts are chosen twice in a row


class Forecast:
    """What was wanted of each site, and when its experts will be wanted next. Nothing here holds memory of weights."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """`counts`: how many experts each site has, in the order of the forward pass."""
        self._index = {site: index for index, site in enumerate(counts)}
        self._count_S = np.array(list(counts.values()))
        shape = (len(counts), max(counts.values()))
        self._uses_SE, self._turns_S = np.zeros(shape), np.zeros(len(counts))
        self._last_SE = np.zeros(shape, dtype=np.bool_)
        self._again = self._before = 0.0  # of experts chosen in a turn, those chosen in the next one as well

    def turn(self, site: str, wanted: Sequence[int]) -> None:
        """A site has its turn, in which these experts are wanted."""
        at, now_E = self._index[site], np.zeros_like(self._last_SE[0])
        now_E[list(wanted)] = True
        last_E = self._last_SE[at]
        self._again = self._again * KEEP_AGAIN + np.count_nonzero(now_E & last_E)
        self._before = self._before * KEEP_AGAIN + np.count_nonzero(last_E)
        self._uses_SE[at] = self._uses_SE[at] * KEEP_USES + now_E
        self._turns_S[at] = self._turns_S[at] * KEEP_USES + 1
        self._last_SE[at] = now_E

    def waits(self, site: str, owners: Sequence[tuple[str, int]]) -> NDArray[np.float64]:
        """How many turns from that of `site` on, which it has just had, each (site, expert) is expected to be wanted.

        Of two of one site that are wanted equally often the one of the higher number is wanted later: experts of a turn
        come in order.
        """
        site_C = np.array([self._index[owner] for owner, _ in owners], dtype=np.int64)
        expert_C = np.array([expert for _, expert in owners], dtype=np.int64)
        rounds = len(self._index)
        turn_C = (site_C - self._index[site] - 1) % rounds + 1 + expert_C / (self._uses_SE.shape[1] + 1)
        return turn_C + rounds * (1 / self._chance(site_C, expert_C) - 1)

    def _chance(self, site_C: NDArray[np.int64], expert_C: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probability that each is wanted when its site has a turn.

        It is the share of turns in which it was, with one more turn in which all of the site were wanted alike; of
        those wanted in the last turn it is no less than the share of such that are wanted again.
        """
        turns_S = np.maximum(self._turns_S, 1.0)
        usual_S = self._uses_SE.sum(axis=1) / self._count_S / turns_S
        chance_C = (self._uses_SE[site_C, expert_C] + usual_S[site_C]) / (turns_S[site_C] + 1)
        again = self._again / self._before if self._before else 0.0
        chance_C = np.where(self._last_SE[site_C, expert_C], np.maximum(chance_C, again), chance_C)
        return np.clip(chance_C, 1e-6, 1.0)
