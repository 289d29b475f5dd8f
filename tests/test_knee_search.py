"""The search behind `calls probe`: right within a factor of 1.25, or not sure."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from batchwright.calls import Endpoint
from batchwright.calls.limit.knee import KneeSearch
from batchwright.calls.probe import levels, probe
from batchwright.calls.simulator import Simulator
from batchwright.errors import ConfigError, NoServer
from bench_probe import right_answer, search
from foreign_server import Foreign
from limit_families import draw
from limit_world import KINDS, World


@pytest.mark.parametrize("kind", KINDS)
def test_it_names_the_fewest_calls_with_nearly_the_best_throughput(kind: str) -> None:
    sure = wrong = 0
    for seed in range(200, 206):
        world = draw(kind, seed)
        found = search(world, 1500)
        answer = found.answer
        assert answer is not None
        assert found.calls <= 1500
        assert 1 <= answer.low <= answer.high
        sure += answer.sure
        apart = abs(math.log(answer.concurrency / right_answer(world)))
        wrong += answer.sure and apart > math.log(1.25) + 1e-9
    assert sure >= 2
    assert wrong == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("knee", [1, 2, 3, 7, 30])
def test_a_steady_server_is_told_exactly_enough_with_few_calls(kind: Any, knee: int) -> None:
    world = World(kind, (knee,), sigma=0.05, base=0.6, seed=3)
    found = search(world, 3000)
    right = right_answer(world)

    assert found.answer is not None
    assert found.answer.sure
    assert right / 1.25 <= found.answer.concurrency <= 1.25 * right
    assert not found.answer.at_most
    # It never goes far above: a slow server would take minutes for that.
    assert max(visit.level for visit in found.visits) <= 8 * knee


def test_it_is_not_sure_with_few_calls_nor_on_a_server_that_is_very_unsteady() -> None:
    world = World("queue", (20,), sigma=0.5, seed=5)
    assert not search(world, 100).answer.sure
    assert search(world, 4000).answer.sure
    assert not search(replace(world, drift=1.0, sigma=1.5), 800).answer.sure


def test_it_says_that_throughput_still_grows_at_the_most_allowed() -> None:
    found = KneeSearch(most=16)
    while not found.over:
        found.on_done(float(found.calls), 1.0, found.limit, ok=True)
    assert found.answer is not None
    assert found.answer.at_most
    assert found.answer.sure
    assert found.answer.concurrency in (15, 16)


@pytest.mark.parametrize("rejects", [True, False])
def test_a_level_that_rejects_or_fails_is_a_bound_and_levels_above_it_are_left_alone(
    rejects: bool,
) -> None:
    found = KneeSearch(most=64)
    now, bad = 0.0, 0
    while not found.over:
        now += 1.0
        if found.limit <= 10:
            found.on_done(now, 1.0, found.limit, ok=True)
            continue
        bad += 1
        if rejects:
            found.on_reject(now, found.limit, retry_after_s=0.5)
            assert found.pause_until == now + 0.5
        else:
            found.on_done(now, 1.0, found.limit, ok=False)
    assert found.ceiling == 11
    assert found.answer is not None
    assert 8 <= found.answer.concurrency <= 10
    assert bad < 40
    assert [level.sustained for level in levels(found.visits) if level.concurrency > 10] == [
        False for visit in {visit.level for visit in found.visits} if visit > 10
    ]


def test_a_server_that_fails_with_a_single_call_has_no_answer() -> None:
    found = KneeSearch()
    while not found.over:
        found.on_done(float(found.calls), 1.0, 1, ok=False)
    assert found.answer is None
    assert found.calls < 10


@pytest.mark.parametrize("given", [{"most": 0}, {"max_calls": 0}, {"max_seconds": 0.5}])
def test_a_budget_of_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} must be at least 1"):
        KneeSearch(**given)


def test_the_time_is_a_bound_even_if_nothing_comes_back() -> None:
    silent = frozenset(f"Name three animals that live near water. List {n}." for n in range(9))
    with Foreign("queue", 4, hang=silent).running() as url, pytest.raises((NoServer, ConfigError)):
        probe(Endpoint(url), "m", max_seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_servers_over_http_are_measured_as_they_are(kind: Any) -> None:
    # Slow enough that the way there and back is small beside the call.
    servers: list[Any] = [Simulator(kind=kind, knee=3, latency_s=0.4, sigma=0.2)]
    if kind != "batch":
        servers.append(Foreign(kind, 3, seconds=0.4))
    for server in servers:
        with server.running() as url:
            found = probe(Endpoint(url), "sim", most=32, max_calls=600, max_seconds=60)
        # Under load the machine itself adds to the latency, and the search may rightly say so.
        assert found.answer.low <= 4
        assert found.answer.concurrency in (3, 4) or not found.answer.sure
        assert found.calls <= 600
