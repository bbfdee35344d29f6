"""Which way a model's jobs are done: that follows from what its runner can."""

from umad.client.worker import Worker
from umad.serve.batches import Batches
from umad.serve.growing import Growing
from umad.serve.kinds.base import Joins, Together
from umad.serve.loaded import Loaded
from umad.serve.turns import Desk, Turns


def turns_of(desk: Desk, worker: Worker, loaded: Loaded) -> Turns:
    """The turns of a loaded model."""
    runner = loaded.runner
    if isinstance(runner, Joins) and runner.joins:
        return Growing(desk, worker, loaded, runner)
    if isinstance(runner, Together):
        return Batches(desk, worker, loaded, runner)
    return Turns(desk, worker, loaded)
