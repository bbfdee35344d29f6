"""The simulator finds nothing in the core, and finds what is planted there."""

from dataclasses import replace

import pytest

from tests.simulation.faults import PLANTS
from tests.simulation.packer import UNIT, best
from tests.simulation.run import Outcome, shrink, simulate, story
from tests.simulation.steps import Scenario

SHORT = Scenario(0, 1.5, trouble=20.0)
FROZEN = Scenario(0, 1.5, trouble=200.0, faults=frozenset({"stop"}))
SEEDS = 20
# By which rules each planted fault shows: one that is forgotten is passed, too.
RULES = {
    "double release": {"double release"},
    "lost waiter": {"lost waiter", "starved"},
    "lost wake-up": {"lost wake-up"},
    "starved": {"starved"},
    "eviction": {"eviction"},
    "fenced write": {"fenced write"},
    "fenced unlock": {"fenced write"},
    "recovery": {"recovery"},
    "oversold": {"oversold"},
}


def clean(outcome: Outcome) -> None:
    assert outcome.found is None, story(shrink(outcome))


def test_some_hours_without_faults() -> None:
    clean(simulate(Scenario(2, 0.1, faults=frozenset())))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hours_of_load_and_faults(seed: int) -> None:
    outcome = simulate(Scenario(seed, 2.0, trouble=15.0))
    clean(outcome)
    assert outcome.counts["grants"] > 50
    assert outcome.counts["restarts"] > 2


@pytest.mark.slow
def test_looks_that_are_left_out_change_no_rule() -> None:
    clean(simulate(replace(SHORT, seed=4, hours=0.25, dense=True)))


@pytest.mark.slow
def test_equal_seeds_give_equal_runs() -> None:
    first, second = (simulate(replace(SHORT, seed=7, hours=0.3)) for _ in range(2))
    assert first.trace == second.trace
    assert (first.counts, first.used) == (second.counts, second.used)
    assert first.trace != simulate(replace(SHORT, seed=8, hours=0.3)).trace


def find(planted: str) -> Outcome:
    """The first seed at which a planted fault shows."""
    usual = FROZEN if planted == "fenced unlock" else SHORT
    for seed in range(SEEDS):
        outcome = simulate(replace(usual, seed=seed), PLANTS[planted])
        if outcome.found is not None:
            return outcome
    pytest.fail(f"{planted} shows at none of {SEEDS} seeds")


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_fault_is_found(planted: str) -> None:
    outcome = find(planted)
    assert outcome.found is not None
    assert outcome.found.rule in RULES[planted], story(outcome)


@pytest.mark.slow
def test_what_is_found_is_told_with_less() -> None:
    plant = PLANTS["eviction"]
    outcome = find("eviction")
    less = shrink(outcome, plant)
    assert len(less.scenario.programs) < len(outcome.scenario.programs)
    assert less.scenario.faults < outcome.scenario.faults
    assert less.scenario.hours <= outcome.at_s / 3600 + 1e-6
    again = simulate(less.scenario, plant)
    assert str(again.found) == str(less.found)
    assert f"again: python -m tests.simulation --seed {less.scenario.seed} --hours" in story(less)


@pytest.mark.parametrize(
    ("sizes", "room", "most"),
    [
        ([], 10, 0),
        ([4, 4, 4], 10, 8),
        ([7, 4, 4], 10, 8),
        ([7, 3, 4], 10, 10),
        ([11], 10, 0),
        ([1], -3, 0),
    ],
)
def test_the_packer_finds_the_best_choice(sizes: list[int], room: int, most: int) -> None:
    assert best([size * UNIT for size in sizes], room * UNIT) == most * UNIT
