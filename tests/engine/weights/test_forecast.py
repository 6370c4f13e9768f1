"""Which experts stay where not all have room: in turns that come round and round, and where some are chosen more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.weights.loading.expert_cache import ExpertCache
from firstlight.engine.weights.loading.forecast import Forecast
from tests.engine.weights.holding import Get, Held, least

Turn = tuple[str, list[int]]
ROUNDS = 12


def test_of_turns_that_want_all_what_was_used_last_is_wanted_last() -> None:
    forecast = Forecast({"a": 2, "b": 2, "c": 2})
    for _ in range(3):
        for site in "abc":
            forecast.turn(site, [0, 1])
    forecast.turn("a", [0, 1])
    waits = forecast.waits("a", [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)])
    assert waits.argsort().tolist() == [2, 3, 4, 5, 0, 1]


def test_who_is_chosen_seldom_is_wanted_later_than_who_is_always() -> None:
    forecast = Forecast({"a": 3, "b": 3})
    for number in range(40):
        forecast.turn("a", [0] if number % 8 else [0, 1])
        forecast.turn("b", [0] if number % 8 else [0, 1])
    always, seldom, never = forecast.waits("b", [("b", 0), ("a", 1), ("a", 2)])
    assert always < 3 < seldom < never
    assert 6 < seldom < 30, "once in eight rounds of two turns"


def test_who_was_chosen_just_now_is_wanted_again_as_such_were_before() -> None:
    steady, changing = Forecast({"a": 8}), Forecast({"a": 8})
    for number in range(64):
        steady.turn("a", [number // 16])
        changing.turn("a", [number % 4])
    last = [("a", 3)]
    assert steady.waits("a", last) < 2 < changing.waits("a", last)


@pytest.fixture
def cache(checkpoint: Get, held: Callable[..., Held]) -> ExpertCache:
    """With room for about half of the experts of a small mixture."""
    path = checkpoint("qwen3_moe")
    smallest = least(path, "experts", held)
    role_bytes = held(path, "experts", None).weights.pieces.bytes_by_role()["expert"]
    experts = held(path, "experts", smallest + role_bytes // 2).weights.experts
    assert 2 <= experts.report().units < sum(experts.experts(site) for site in sites(experts))
    return experts


def sites(cache: ExpertCache) -> list[str]:
    return list(cache._owned.sites)


def carried_out(cache: ExpertCache, turns: Sequence[Turn]) -> float:
    """The share of hits when tokens choose so."""
    before = cache.report()
    for site, wanted in turns:

        def call(places_M: torch.Tensor, slots_M1: torch.Tensor, _: object, experts_C: torch.Tensor) -> torch.Tensor:
            return experts_C[slots_M1[:, 0].long()].float()[:, None]

        got = cache.routed(site, torch.tensor([[one] for one in wanted]), 0, call)
        assert got[:, 0].tolist() == wanted, "each token gets its own expert"
        cache.check()
    after = cache.report()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    assert hits + misses == sum(len(wanted) for _, wanted in turns)
    return hits / (hits + misses)


def of_the_oldest(turns: Sequence[Turn], size: int) -> float:
    """The share of hits where the one that was not used for longest leaves."""
    there: OrderedDict[tuple[str, int], None] = OrderedDict()
    hits = count = 0
    for site, wanted in turns:
        for one in wanted:
            key, count = (site, one), count + 1
            hits += key in there
            there[key] = None
            there.move_to_end(key)
            if len(there) > size:
                there.popitem(last=False)
    return hits / count


def test_where_a_round_wants_more_than_fits_most_of_what_fits_stays(cache: ExpertCache) -> None:
    round_of = [(site, list(range(cache.experts(site)))) for site in sites(cache)]
    carried_out(cache, round_of)
    found = carried_out(cache, round_of * ROUNDS)
    size, count = cache.report().units, sum(len(wanted) for _, wanted in round_of)
    assert of_the_oldest(round_of * ROUNDS, size) == 0
    assert found >= (size - max(1, size // 4)) / count * 0.9


def test_what_is_always_chosen_stays_whatever_else_is(cache: ExpertCache) -> None:
    def turns() -> Iterator[Turn]:
        for number in range(4 * ROUNDS):
            for site in sites(cache):
                yield site, sorted({0, 1 + number % (cache.experts(site) - 1)})

    found = carried_out(cache, list(turns()))
    assert found >= 0.9 / 2, "one of the two of each turn"
    assert found >= of_the_oldest(list(turns()), cache.report().units)


def test_more_wanted_at_once_than_there_is_room_for_with_all_of_them_there(cache: ExpertCache) -> None:
    """Then one that is wanted later in the turn has to leave, and comes again."""
    site, bank = sites(cache)[0], cache._banks[sites(cache)[0]]
    size = min(bank.size, cache.experts(site) - 1)
    carried_out(cache, [(site, list(range(1, size + 1)))] * 2)
    carried_out(cache, [(site, list(range(size + 1)))])


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 5), min_size=1)), min_size=1, max_size=40))
def test_a_wait_is_a_number_of_turns_and_who_was_never_wanted_waits_longest(
    chosen: list[tuple[int, set[int]]],
) -> None:
    names = ["a", "b", "c"]
    forecast = Forecast(dict.fromkeys(names, 6))
    for number, wanted in chosen:
        forecast.turn(names[number], sorted(wanted))
    here = names[chosen[-1][0]]
    waits = forecast.waits(here, [(here, one) for one in range(6)])
    assert (waits >= 1).all()
    ever = set().union(*(wanted for number, wanted in chosen if names[number] == here))
    never = [one for one in range(6) if one not in ever]
    if never:
        assert waits[sorted(ever)].max() <= waits[never].max()
