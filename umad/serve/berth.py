"""Where one instance of a model is registered with the daemon, and where it loads.

Owns ``Berth``: the instance's worker, and which of the places it may run in it is registered for.
Rules:
1. where it is configured to be comes first, then where it may be, in that order;
2. it is registered for one place at a time, loaded or not; the next begins when the last has ended;
3. a place that never fits is passed over, one without room for now is waited for, and what
   several refused says so of each;
4. what only the load needed of a place goes back before the load is measured.
Stays out: when it is loaded and for whom, and what the daemon's word means for its jobs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from umad.client.blocking import Client
from umad.client.crew import Callback
from umad.client.worker import Worker
from umad.errors import NeverFits, UmadError
from umad.serve.devices import place
from umad.serve.instance import no_room
from umad.serve.link import ModelState
from umad.serve.loaded import Load, Loaded
from umad.serve.translate import translated
from umad.settings import ModelSettings
from umad.values import SYSTEM_POOL

FALLBACK_WAIT_S: Final = 5.0  # for room, where there is another place for it
log = structlog.get_logger()


class Berth:
    """One instance's registration; used by its thread, but for ``take_quota`` and ``follow``.

    Args:
        client: the connection to the daemon.
        name: of the instance, for the log.
        model: what to load, as it is configured.
        instance: 0 for the first copy.
        load: see ``Load``.
        guard: the setting ``serve.guard``.
        report: told how far a load is.
        callbacks: what the daemon says to the worker, as ``Client.worker`` names it.

    Attributes:
        worker: what it is registered as now; None where it is not.  Only its thread writes it.
        on: the model as it is registered: where it was configured to be, or elsewhere.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        model: ModelSettings,
        instance: int,
        load: Load,
        guard: str,
        report: Callable[[ModelState], None],
        callbacks: Mapping[str, Callback],
    ) -> None:
        self._client = client
        self._name = name
        self._instance = instance
        self._load = load
        self._guard = guard
        self._report = report
        self._callbacks = callbacks
        self.worker: Worker | None = None
        self.on = model

    def be_known(self, model: ModelSettings) -> None:
        """Register, so that the daemon and its people know of it, loaded or not.

        Raises:
            UmadError: the daemon is not there, or refuses.
        """
        *others, last = _places(model)
        for on in others:
            try:
                self._register(on)
            except NeverFits:
                continue
            else:
                return
        self._register(last)

    def load(
        self, model: ModelSettings, wait_s: float, *, evict: bool, state: str
    ) -> tuple[Worker, Loaded]:
        """Load the model where it should be, or else where it may be.

        Args:
            model: as it is configured now.
            wait_s: how long to wait for room in the last place.
            evict: idle neighbours may be asked to go.
            state: what to report meanwhile.

        Raises:
            UmadError: no place had room, or the load failed.
        """
        refused: UmadError | None = None
        *others, last = _places(model)
        for on in (*others, last):
            patience_s = wait_s if on is last else min(wait_s, FALLBACK_WAIT_S)
            try:
                worker = self._register(on)
                return worker, self._load_on(worker, on, patience_s, evict=evict, state=state)
            except UmadError as error:
                if refused is not None:
                    error.message = f"{refused.message}; and on {on.device}: {error.message}"
                if on is last or not (no_room(error) or isinstance(error, NeverFits)):
                    raise
                refused = error
                log.warning("model.fallback", model=self._name, reason=error.message)
        raise AssertionError("the last place has returned or raised")

    def take_quota(self, old: ModelSettings, new: ModelSettings) -> bool:
        """Have the daemon book by the new quota at once; False: only a fresh load can."""
        worker = self.worker
        if new.quota == old.quota or worker is None:
            return True
        if self.on is not old or worker.held_bytes + worker.grown_bytes > new.quota:
            return False  # the next look at memory would find it in breach
        try:
            worker.set_quota(new.quota, new.peak_bytes)
        except UmadError as error:
            log.warning("model.quota_refused", model=self._name, reason=error.message)
            return False
        return True

    def follow(self, old: ModelSettings, new: ModelSettings) -> None:
        """It is configured so now; what is registered for another place stays as it is."""
        if self.on is old:  # else it is where it may be, and its next load begins anew
            self.on = new

    def close(self) -> None:
        """End the registration; the daemon takes back what it still holds."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _register(self, on: ModelSettings) -> Worker:
        if self.worker is not None and self.on == on:
            return self.worker
        self.close()
        self.worker = self._client.worker(
            on.name,
            quota=on.quota,
            peak=on.peak_bytes,
            instance=self._instance,
            priority=on.priority,
            pin=on.pin,
            pool=on.pool,
            **self._callbacks,
        )
        self.on = on
        return self.worker

    def _load_on(
        self, worker: Worker, on: ModelSettings, wait_s: float, *, evict: bool, state: str
    ) -> Loaded:
        def progress(stage: str, ratio: float) -> None:
            worker.progress(stage, ratio)
            self._report(ModelState(state, stage, ratio))

        def load() -> Loaded:
            self._report(ModelState(state))
            where = place(on, worker.account, self._guard)
            try:
                with translated(self._name, "load"), where.use():
                    runner = self._load(
                        on.kind,
                        on.path,
                        device=on.device,
                        dtype=on.dtype,
                        progress=progress,
                    )
            finally:
                where.release()  # of a failed load all, of one that went well what only it needed
            return Loaded(self._name, runner, where)

        return worker.load(load, wait_s=wait_s, evict=evict)


def _places(model: ModelSettings) -> list[ModelSettings]:
    """Where it may run, as it would be configured there; the first is where it should."""
    there = [replace(model, device=name, pool=SYSTEM_POOL) for name in model.fallback]
    return [model, *there]
