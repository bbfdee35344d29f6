"""What is measured of answers that grow together, from one report to the next.

Owns ``Growth``; ``growing`` fills it in and tells it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from umad.client.meter import Start, Took
from umad.client.worker import Worker
from umad.serve.jobs import Job

NOTHING: Final = Took(0, exact=True)


@dataclass(slots=True, eq=False)
class Growth:
    """One turn: its jobs, and what is told of it next; it may last for hours under load.

    ``start`` and ``began_s`` are where that began to be measured, and ``took`` what was measured
    before ``start``; ``tokens`` and ``rows`` those of the step with the most of both since;
    ``predicted`` the most bytes that its answers were expected to take; ``whole``: nothing has
    failed; ``left``: an answer has ended; ``joined`` and ``carried``: the longest that has joined
    since, and that had joined before; ``spared``: what reading would have taken beside, had
    nothing been kept of prompts.
    """

    jobs: list[Job]
    start: Start
    began_s: float
    tokens: int = 0
    rows: int = 0
    predicted: int = 0
    whole: bool = True
    left: bool = False
    joined: int = 0
    carried: int = 0
    spared: int = 0
    took: Took = NOTHING

    @property
    def shows_all(self) -> bool:
        """What was measured holds the reading of the longest prompt, which takes most."""
        return self.whole and self.joined >= self.carried

    def see(self, tokens: int, rows: int) -> None:
        """A step has so many rows, the longest of so many tokens."""
        if tokens * rows > self.tokens * self.rows:
            self.tokens, self.rows = tokens, rows

    @contextmanager
    def aside(self, worker: Worker) -> Iterator[None]:
        """What is kept of prompts meanwhile, or goes, was held before: it is no answer's cost.

        Else the cost model would learn it as theirs, or take them for less than they are.
        """
        self.took = self.took.then(worker.meter.end(self.start))
        before = worker.account_bytes
        try:
            yield
        finally:
            held = self.start.held
            if held is not None:
                held += worker.account_bytes - before
            self.start = replace(worker.meter.begin(worker.account, coarse=False), held=held)
