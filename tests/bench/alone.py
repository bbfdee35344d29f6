"""An engine that does each job alone, for comparison: ``python -m tests.bench.alone``."""

import sys
from typing import Any

from umad.config import Settings
from umad.serve import engine
from umad.serve.kinds.base import Cancelled, Job, Result, Runner
from umad.serve.loaded import Load


class Alone:
    """A runner that can do no more than one job at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.kind = runner.kind
        self.resident_bytes = runner.resident_bytes

    def bytes_needed(self, job: Job) -> int:
        return self._runner.bytes_needed(job)

    def size(self, job: Job) -> tuple[int, int]:
        return self._runner.size(job)

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        return self._runner.run(job, cancelled)


def libraries(settings: Settings) -> Load:
    load = engine.bring_all(settings)

    def alone(*args: Any, **named: Any) -> Alone:
        return Alone(load(*args, **named))

    return alone


if __name__ == "__main__":
    sys.exit(engine.main(libraries=libraries))
