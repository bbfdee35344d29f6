"""Runs scenarios, sums them up, and shrinks what breaks a rule.

10,000 hours are many runs of some hours each, with seeds in a row: each stands for itself, so
that whatever is found is found again from its own beginning.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from random import Random

from tests.bench.figures import Figure
from tests.simulation.judge import Judge
from tests.simulation.program import Program
from tests.simulation.steps import Found, Scenario
from tests.simulation.world import World
from umad.units import GIB

HOURS_EACH = 20.0
FILL_MIN = 0.9

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(slots=True)
class Outcome:
    """What came of one scenario."""

    scenario: Scenario
    found: Found | None
    at_s: float
    trace: tuple[str, ...]
    counts: dict[str, int]
    used: int
    possible: int
    unbound: int
    wait_max_s: float
    cpu_s: float


def simulate(scenario: Scenario, plant: Plant = nullcontext) -> Outcome:
    """One scenario from its beginning to its end, or to the first rule broken."""
    began = time.process_time()
    world = World(scenario)
    judge = Judge(world)
    found = None
    with plant():
        try:
            world.start()
            world.programs += [Program(world, number) for number in scenario.programs]
            _befall(world)
            world.run()
        except Found as error:
            found = error
    models = [model for program in world.programs for model in program.models]
    counts = {
        "sessions": len(judge.use.sessions),
        "served": sum(model.served for model in models),
        "left": sum(model.left for model in models),
        "grants": judge.grants,
        "evictions": judge.evictions,
        "kills": judge.kills,
        "restarts": judge.restarts,
        "looks": world.looks,
        "calls": world.calls,
        "steps": world.steps,
        "samples": judge.use.samples,
        "tight": judge.use.tight,
        **judge.told_of,
    }
    return Outcome(
        scenario,
        found,
        world.now_s,
        tuple(world.trace),
        counts,
        judge.use.used,
        judge.use.possible,
        judge.use.unbound,
        judge.wait_max_s,
        time.process_time() - began,
    )


def _befall(world: World) -> None:
    """What befalls the whole machine, from time to time."""
    draw, machine = Random(f"{world.scenario.seed}/machine"), world.machine

    def often(mean_s: float, deed: Callable[[], None]) -> None:
        def again() -> None:
            deed()
            world.disturb()
            often(mean_s, deed)

        world.after(draw.expovariate(1 / mean_s), again)

    def restart() -> None:
        if world.up:
            world.stop(draw.uniform(0.05, 2.0))

    def tenants() -> None:
        size = int(draw.choice((2, 4, 6, 8, 12, 25)) * GIB)
        machine.tenants.move(size, world.now_s, draw.uniform(0.1, 30))

    def resized() -> None:
        machine.capacity = int(draw.choice((128, 128, 128, 112, 96)) * GIB)

    def blind() -> None:
        machine.broken_until_s = world.now_s + draw.uniform(0.3, 20)

    def garbage() -> None:
        for body in draw.sample(list(machine.bodies.values()), min(1, len(machine.bodies))):
            body.broken_until_s = world.now_s + draw.uniform(0.3, 20)

    for name, mean_h, deed in (
        ("restart", 6, restart),
        ("machine", 3, tenants),
        ("machine", 30, resized),
        ("broken", 8, blind),
        ("broken", 8, garbage),
    ):
        if name in world.scenario.faults:
            often(mean_h * 3600 / world.scenario.trouble, deed)


def scenarios(hours: float, usual: Scenario) -> Iterator[Scenario]:
    """So many hours like the usual, from its seed on."""
    seed = usual.seed
    while hours > 0:
        yield replace(usual, seed=seed, hours=min(hours, HOURS_EACH))
        hours, seed = hours - HOURS_EACH, seed + 1


def many(wanted: Iterable[Scenario], jobs: int) -> Iterator[Outcome]:
    """Their outcomes, in order, from ``jobs`` processes."""
    if jobs == 1:
        yield from map(simulate, wanted)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(simulate, wanted)


def shrink(outcome: Outcome, plant: Plant = nullcontext) -> Outcome:
    """The same rule broken with fewer programs, fewer kinds of faults, in less time."""
    assert outcome.found is not None
    best = outcome
    for left_out in (*sorted(outcome.scenario.faults), *outcome.scenario.programs):
        one = best.scenario
        tried = replace(
            one,
            programs=tuple(number for number in one.programs if number != left_out),
            faults=one.faults - {str(left_out)},
            hours=best.at_s / 3600 + 1e-6,
        )
        again = simulate(tried, plant)
        if again.found is not None and again.found.rule == outcome.found.rule:
            best = again
    return best


def story(outcome: Outcome) -> str:
    """How a rule was broken, and how to see it again."""
    scenario = outcome.scenario
    programs = ",".join(map(str, scenario.programs))
    faults = ",".join(sorted(scenario.faults)) or "none"
    return "\n".join(
        (
            *outcome.trace,
            f"{outcome.found}",
            f"again: python -m tests.simulation --seed {scenario.seed} "
            f"--hours {scenario.hours:.6f} --trouble {scenario.trouble} "
            f"--programs {programs} --faults {faults}",
        )
    )


def _fill(name: str, outcomes: list[Outcome], packer: str, target: str) -> Figure:
    """Bytes in use per byte of a packer's; its mean in GiB is the rival."""
    shares = [one.used / mine for one in outcomes if (mine := getattr(one, packer))]
    total = sum(getattr(one, packer) for one in outcomes)
    fill = sum(one.used for one in outcomes) / max(1, total)
    mean = total / max(1, sum(one.counts["samples"] for one in outcomes)) / GIB
    runs = len(outcomes)
    ok = not target or fill >= FILL_MIN
    return Figure(
        "admission", name, fill, "ratio", target, mean, runs, min(shares), max(shares), ok
    )


def figures(outcomes: list[Outcome]) -> list[Figure]:
    """What is promised of the simulated hours."""
    hours = sum(outcome.at_s for outcome in outcomes) / 3600
    rules = Counter(outcome.found.rule for outcome in outcomes if outcome.found is not None)
    starved = rules["lost waiter"] + rules["starved"]
    wake_ups = rules["lost wake-up"]
    broken = rules.total() - starved - wake_ups
    runs = len(outcomes)

    def none(figure: str, value: int) -> Figure:
        return Figure("admission", figure, value, "count", "0", None, runs, 0, value, value == 0)

    waits = [outcome.wait_max_s for outcome in outcomes]
    speed = [outcome.at_s / 3600 / max(outcome.cpu_s, 1e-9) for outcome in outcomes]
    return [
        none(f"rules broken in {hours:.0f} simulated hours", broken),
        none("starved beyond the bound", starved),
        none("lost wake-ups", wake_ups),
        _fill("memory in use against a clairvoyant packer", outcomes, "possible", f">= {FILL_MIN}"),
        _fill("memory in use against a packer without physics", outcomes, "unbound", ""),
        Figure(
            "admission",
            "longest wait for a grant",
            max(waits),
            "s",
            "<= 300",
            None,
            runs,
            min(waits),
            max(waits),
            max(waits) <= 300,
        ),
        Figure(
            "admission",
            "simulated hours a CPU second",
            hours / max(1e-9, sum(outcome.cpu_s for outcome in outcomes)),
            "h/s",
            "",
            None,
            runs,
            min(speed),
            max(speed),
            True,
        ),
    ]
