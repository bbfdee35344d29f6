"""Simulated hours of admission under load and faults.

python -m tests.simulation --hours 10000 --seed 1 --jobs 2
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace

from tests.simulation.run import Outcome, figures, many, scenarios, shrink, story
from tests.simulation.steps import Scenario


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--programs", help="their numbers, like 0,3")
    parser.add_argument("--faults", help="names; none for none")
    parser.add_argument("--trouble", type=float, default=1.0, help="faults, times the usual")
    parser.add_argument("--load", type=float, default=1.0, help="sessions, times the usual")
    parser.add_argument("--dense", action="store_true", help="take every look, also idle ones")
    given = parser.parse_args()
    usual = Scenario(given.seed, 0.0, trouble=given.trouble, load=given.load, dense=given.dense)
    if given.programs:
        usual = replace(usual, programs=tuple(map(int, given.programs.split(","))))
    if given.faults:
        usual = replace(usual, faults=frozenset(given.faults.split(",")) - {"none"})
    wanted = scenarios(given.hours, usual)
    outcomes: list[Outcome] = []
    for outcome in many(wanted, given.jobs):
        outcomes.append(outcome)
        if outcome.found is not None:
            print(story(shrink(outcome)), file=sys.stderr)
        print(
            f"# seed {outcome.scenario.seed}: {outcome.found or 'nothing found'}, "
            f"{outcome.used / max(1, outcome.possible):.3f} in use, {outcome.cpu_s:.1f} s; "
            f"{sum(one.at_s for one in outcomes) / 3600:.0f} h in all",
            file=sys.stderr,
            flush=True,
        )
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    print("# " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    shown = figures(outcomes)
    for figure in shown:
        print(figure.line())
    return 0 if all(figure.ok for figure in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
