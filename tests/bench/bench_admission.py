"""Admission in simulated time: nothing broken, nobody starved, memory in use.

`python -m tests.simulation --hours 10000 --jobs 2` is the whole of it; here, a sample.
"""

from tests.bench.figures import Figure
from tests.simulation.run import figures, many, scenarios
from tests.simulation.steps import Scenario

HOURS = 200.0


def run() -> list[Figure]:
    return figures(list(many(scenarios(HOURS, Scenario(1, HOURS)), jobs=2)))
