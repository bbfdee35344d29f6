"""A model in memory: what a worker's thread does with it, and what its forwards have taken.

Rules: the bytes of a run are admitted before it begins; what it took is taken in, however it
ended.  Stays out: when a model is loaded, and for whom.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

from umad.client.blocking import Client
from umad.client.worker import Worker
from umad.core.cost import BEYOND_MAX, CostModel, Sample
from umad.errors import UmadError
from umad.serve.devices import Place
from umad.serve.jobs import Job
from umad.serve.kinds.base import Runner
from umad.serve.link import pack_vector
from umad.serve.translate import translated
from umad.settings import ModelSettings
from umad.units import MIB

# A huge page of the tensors and one of other blocks may be used in part, which no sample shows.
HUGE_PAGES_BYTES: Final = 4 * MIB
log = structlog.get_logger()


class Load(Protocol):
    """Reads a model from its folder; ``umad.serve.loader.load`` is the real one."""

    def __call__(
        self,
        kind: str,
        path: str,
        *,
        device: str,
        dtype: str,
        progress: Callable[[str, float], None],
    ) -> Runner:
        """See ``umad.serve.loader.load``."""
        ...


class Loaded:
    """A model in a box: the lease hangs on the box, so the model can go before the lease does.

    Args:
        name: of the instance, for the log.
        runner: the model.
        place: where it lives.
    """

    def __init__(self, name: str, runner: Runner, place: Place) -> None:
        self._name = name
        self.runner = runner
        self.place = place
        self._cost = CostModel()

    def learn(self, client: Client, model: ModelSettings) -> None:
        """Ask the daemon, which keeps it, what the forwards of this model have taken so far."""
        shape = f"{model.kind} {model.device} {model.dtype} {self.runner.resident_bytes}"
        try:
            known = client.call("cost", {"model": model.name, "shape": shape})
        except UmadError as error:
            log.info("model.cost_unknown", model=model.name, why=error.message)
        else:
            self._cost = CostModel(Sample(*row) for row in known.get("samples", ()))

    def run(
        self, worker: Worker, job: Job, quota: int, wait_s: float, check: Callable[[], None]
    ) -> dict[str, Any]:
        """Do a job.

        Args:
            worker: whose quota it is.
            job: is asked between steps whether it was cancelled.
            quota: what the model may hold without asking, in bytes.
            wait_s: for the bytes beyond it.
            check: raises why the job is not to begin, or its result not to be used.

        Raises:
            UmadError: the bytes were refused, or the model failed.
        """
        runner = self.runner
        with translated(self._name, "job"):
            worst_case = runner.bytes_needed(job.data)
            tokens, rows = runner.size(job.data)
        # One that is far larger than any since the load builds caches, too, which no sample shows.
        known = tokens * rows <= BEYOND_MAX * worker.meter.warmed
        need = self._cost.predict(tokens, rows, worst_case, known=known)
        held = runner.resident_bytes
        if worker.account is not None:  # what it keeps from run to run is there already
            held = max(held, worker.account_bytes + HUGE_PAGES_BYTES)
        beyond = max(0, held + need - quota)
        forward = worker.forward(beyond, predicted=need, tokens=tokens, batch=rows, wait_s=wait_s)
        try:
            with forward:
                check()
                try:
                    with translated(self._name, "job"), self.place.use():
                        done = runner.run(job.data, lambda: job.cancelled)
                finally:
                    if beyond:  # torch would keep the burst's segments after its lease has ended
                        self.place.release()
                forward.tokens, forward.batch = done.size or (tokens, rows)
                check()  # a run that was cut short ends like any other, and shows nothing
        finally:
            if forward.peak is not None:  # it began
                took = (forward.tokens, forward.batch, forward.peak, need)
                self._cost.observe(Sample(*took, exact=forward.exact))
        if "vectors" in done.data:
            return {**done.data, "vectors": [pack_vector(one) for one in done.data["vectors"]]}
        return done.data
