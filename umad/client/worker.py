"""A model instance under contract: load, forward, burst, unload.

Owns the order in which a well-behaved worker talks to the daemon, and that whatever was booked
is given back exactly once: by the normal path, or by a finalizer that knows only a plain token
(``mailbox.Hold``).  What a reconnect swaps is in ``bond``.
"""

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from umad.client.accounts import process_page
from umad.client.bond import Bond
from umad.client.burst import Burst, Forward
from umad.client.cores import cap_threads
from umad.client.interrupt import Interruptible
from umad.client.loading import Load
from umad.client.mailbox import Ended
from umad.client.memory import (
    drop_frames,
    forget_frames,
    give_back,
    is_out_of_memory,
    process_bytes,
)
from umad.client.meter import Meter
from umad.client.prefault import prefault
from umad.errors import (
    InvalidParams,
    QuotaExceeded,
    WorkerRevoked,
)
from umad.guard.account import SHARED, account
from umad.units import UnitError, parse_bytes
from umad.wire.messages import check_param, check_params

if TYPE_CHECKING:
    from umad.client.blocking import Client

T = TypeVar("T")
_LOAD_WAIT_S: Final = 300.0
_BURST_WAIT_S: Final = 5.0


class Worker:
    """One registered model instance; made by ``Client.worker``.

    Attributes:
        name: ``llama``, or ``llama/1`` for the second instance.
        bond: its registration; for the other parts of this package.
        meter: measures its forwards since the load.
        revoked: set as soon as the daemon has told this worker to stop.
        callbacks: what the listener calls, by the notification's name.
    """

    def __init__(
        self,
        client: "Client",
        registration: Mapping[str, Any],
        callbacks: Mapping[str, Callable[[dict[str, Any]], None]],
    ) -> None:
        sizes = {name: _size("register", name, registration[name]) for name in ("quota", "peak")}
        self._client = client
        self.bond: Final = Bond(client, {**registration, **sizes})
        self.name: Final = self.bond.name
        self._interruptible = Interruptible()
        self.meter = Meter()
        self._computing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.revoked = threading.Event()
        self._told: Mapping[str, Any] = {}
        self.callbacks: Final = callbacks

    @property
    def account(self) -> int | None:
        """Its slot in this process's account page; None where no guard enforces its quota."""
        return self.bond.account

    @property
    def id(self) -> int | None:
        """The daemon's number for it now; None without a daemon."""
        binding = self.bond.binding
        return None if binding is None else binding.worker

    @property
    def loaded(self) -> bool:
        """It has a model."""
        return self.bond.kept.live() is not None

    @property
    def held_bytes(self) -> int:
        """What the loaded model was measured to hold; 0 without one."""
        hold = self.bond.kept.live()
        return 0 if hold is None else hold.bytes

    @property
    def account_bytes(self) -> int:
        """What its account holds now; 0 without a guard."""
        slot = self.bond.account
        return 0 if slot is None else process_page.used(slot)

    @property
    def grown_bytes(self) -> int:
        """What its account holds beyond what the load was measured at; 0 without a guard."""
        return max(0, self.account_bytes - self.held_bytes)

    @property
    def stray_bytes(self) -> int:
        """What its process has grown by that no account counts; 0 where it has other workers.

        Blocks that are no tensors, and libraries' own.  A process is held against its baseline and
        the quotas of its workers, so of a single worker's quota these take their part.
        """
        if self.bond.baseline is None or self.bond.account is None or not self._client.has_one:
            return 0
        return max(0, process_bytes() - self.bond.baseline - self.account_bytes)

    def load(
        self,
        loader: Callable[[], T],
        *,
        wait_s: float = _LOAD_WAIT_S,
        peak: int | str | None = None,
        evict: bool = True,
    ) -> T:
        """Load the model within its booked peak, alone on the machine, and measure it.

        The quota is bound to the life of what ``loader`` returns: when that object is dropped
        without ``unload``, the daemon is told (and counts a leak).  An object that cannot be
        referenced weakly (a tuple, a dict) is kept until ``unload``.

        Args:
            loader: builds the model and returns it; it should keep nothing else.
            wait_s: how long to queue for room, and then for the load mutex.
            peak: bytes to book while loading, where not those of the registration; the quota is
                booked in any case.
            evict: idle models may be asked to go for this one while it waits for room.

        Raises:
            QuotaDenied, WaitedTooLong: there was no room in time.
            QuotaExceeded: the model holds more than its quota; it was dropped.
            WorkerRevoked: the worker was stopped while it loaded.
            DaemonUnavailable: no daemon, and the client does not allow that.
        """
        if self.bond.kept.live() is not None:
            raise InvalidParams(f"worker {self.name} has a model; unload it first")
        self.check_revoked()
        self.meter = Meter()
        size = self.bond.registration["peak"] if peak is None else _size("reserve", "bytes", peak)
        load = Load.reserve(self._client, self.bond, size, wait_s, evict=evict)
        try:
            load.begin(wait_s)
            try:
                return self._load(loader, load)
            finally:
                load.end()
        except BaseException:
            load.void()
            raise

    def _load(self, loader: Callable[[], T], load: Load) -> T:
        slot = self.bond.account  # one that it is given only now has none of the model's bytes
        model: T | None = None
        try:
            give_back(slot)  # or the model moves into pages that were counted before
            if load.prefault:
                prefault(load.hold.bytes, self.check_revoked)
            before = _held_by(slot)
            with self.running():
                model = loader()
            give_back(slot)  # what only the loading needed is not the model's
            measured = max(_held_by(slot) - before, 0)
            self.check_revoked()
            load.commit(model, measured)
        except BaseException as error:
            # Its bytes must be gone before the books say so.
            model = None
            forget_frames(error)
            give_back(slot)
            raise
        return model

    def unload(self) -> int:
        """Give the model's memory back.  Empty the loaded object first, or drop it right after.

        An object that was dropped before has been reported as leaked, and its lease released.

        Returns:
            Bytes by which the process shrank; 0 without a model.
        """
        hold = self.bond.kept.let_go()
        if hold is None:
            return 0
        before = process_bytes()
        give_back(self.bond.account)
        freed = max(before - process_bytes(), 0)
        hold.ended = True
        self._client.end(hold, leaked=False)
        return freed

    def forward(
        self,
        bytes: int | str = 0,  # noqa: A002  # the protocol's word
        *,
        predicted: int = 0,
        tokens: int = 0,
        batch: int = 1,
        wait_s: float = _BURST_WAIT_S,
    ) -> Forward:
        """One forward pass, for a ``with`` statement; reported to the daemon afterwards.

        Without ``bytes`` it asks nobody and goes on without a daemon.

        Args:
            bytes: what it needs beyond the steady quota; booked before it begins.
            predicted: what it was expected to take beyond what the worker holds, in bytes.
            tokens: of one row, the padded length; may be set on the result as well.
            batch: rows; may be set on the result as well.
            wait_s: how long to queue for ``bytes``.

        Raises:
            WorkerRevoked: on entering or leaving: the worker was told to stop, and what the
                forward made is to be thrown away.
            RequestRejected, DaemonUnavailable: on entering: ``bytes`` were not granted.
        """
        return Forward(self, bytes, predicted, tokens, batch, wait_s)

    def admit(
        self,
        bytes: int | str,  # noqa: A002  # the protocol's word
        *,
        wait_s: float = _BURST_WAIT_S,
        ttl_s: float | None = None,
    ) -> Burst:
        """Book bytes beyond the steady quota for a while.

        Args:
            bytes: how many; a number, or text with a unit.
            wait_s: how long to queue for them.
            ttl_s: the daemon ends the lease after this; its own limit where None.

        Raises:
            WorkerRevoked: the worker was told to stop.
            QuotaDenied, WaitedTooLong, NeverFits: not granted.
            DaemonUnavailable: no daemon within 250 ms, and the client does not allow that.
        """
        self.check_revoked()
        size = _size("admit", "bytes", bytes)
        params = {"bytes": size, "wait_s": wait_s}
        if ttl_s is not None:
            params["ttl_s"] = ttl_s
        hold, answer = self.bond.book(self.bond.require(), "admit", params)
        self.bond.lend(hold)
        return Burst(self._client, hold, answer.get("deadline_s", math.inf))

    def progress(self, stage: str, ratio: float) -> None:
        """Tell people how far a load is: a stage ("reading", "building", ...) and 0 to 1.

        Raises:
            InvalidParams: ``stage`` is empty or long, or ``ratio`` is out of range.
        """
        report = {"worker": 0, "stage": stage, "ratio": ratio}
        check_params("progress", report)  # nobody answers a notification
        self.bond.report("progress", report)

    def set_quota(self, quota: int | str, peak: int | str) -> None:
        """Change its steady quota and load peak; a loaded model's booking follows at once.

        Args:
            quota: bytes it may hold once loaded; less than it holds now puts it in breach.
            peak: bytes it may hold while it loads; in effect from its next load on.

        Raises:
            AccessDenied: only members of the admin group may.
            QuotaDenied: there is no room for that much more.
            DaemonUnavailable: no daemon, and the client does not allow that.
        """
        sizes = {
            "quota": _size("set_quota", "quota", quota),
            "peak": _size("set_quota", "peak", peak),
        }
        self.bond.ask(self.bond.require(), "set_quota", {**sizes})
        self.bond.registration = check_params("register", {**self.bond.registration, **sizes})

    def keep(self) -> bool:
        """Somebody wants this model, which the daemon has asked to go.

        The daemon spares it where another can go in its place, and says so (``evict_cancelled``);
        else it still has to go.

        Returns:
            False when the daemon could not be told.
        """
        return self.bond.report("keep", {})

    def close(self) -> None:
        """Unregister; the daemon takes back what the worker holds, once it is seen to be gone."""
        self._client.forget(self)
        self.bond.kept.let_go()
        self.bond.unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- for the other parts of this package ---

    def share_cores(self) -> None:
        """Called at a forward: one thread computes on all cores, any other on one alone.

        The one is the first that runs a forward, for as long as it lives.
        """
        here = threading.current_thread()
        if here in self._computing:
            return
        with self._client.lock:
            alone = any(thread.is_alive() for thread in self._computing)
            self._computing.add(here)
        cap_threads(1 if alone else len(os.sched_getaffinity(0)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """What this thread allocates meanwhile is the worker's; a revoke may interrupt it.

        Raises:
            QuotaExceeded: the guard refused an allocation, or torch or Python had none to give.
            WorkerRevoked: the worker was stopped.
        """
        slot = self.bond.account
        refused = 0 if slot is None else process_page.refused(slot)
        with account(SHARED if slot is None else slot):
            try:
                with self._interruptible:
                    yield
            except Exception as error:
                self.check_revoked()
                if not is_out_of_memory(error) or isinstance(error, QuotaExceeded):
                    raise
                by_guard = slot is not None and process_page.refused(slot) > refused
                drop_frames(error)
                raise QuotaExceeded(
                    f"worker {self.name} "
                    + ("asked for more than its quota" if by_guard else "got no memory"),
                    details={"worker": self.name, "quota_bytes": self.bond.registration["quota"]},
                ) from error

    def interrupt(self) -> None:
        """A courtesy to the thread that works for this worker: ``WorkerRevoked``, soon.

        It does not reach a thread inside a C call before that returns; the guard and the
        daemon do not wait for it.
        """
        self._interruptible.interrupt()

    def finish(self, burst: Burst, report: dict[str, Any]) -> None:
        """Report a forward, which ends its burst lease in the same message."""
        hold = burst.detach()
        if hold is None or hold.lease is None:
            self.bond.report("forward_done", report)
            return
        binding = self.bond.binding
        if binding is not None and binding.link.generation == hold.generation:
            ended = {**report, **hold.ticket}
            if self.bond.report("forward_done", ended):
                return
        hold.mailbox.put(Ended(hold, leaked=False))

    def revoke(self, told: Mapping[str, Any]) -> None:
        """The daemon has told this worker to stop, and why."""
        self._told = told
        self.revoked.set()
        self.interrupt()

    def check_revoked(self) -> None:
        """Raise ``WorkerRevoked`` once the daemon has told this worker to stop."""
        if self.revoked.is_set():
            told = self._told
            raise WorkerRevoked(
                f"worker {self.name} was told to stop: {told.get('reason', 'no reason given')}",
                retry_after_s=5,
                details={key: told[key] for key in ("quota", "measured", "source") if key in told},
            )


def _held_by(slot: int | None) -> int:
    """Bytes to measure a load by: the account's where there is one, the process's else."""
    return process_bytes() if slot is None else process_page.used(slot)


def _size(method: str, name: str, value: int | str) -> int:
    """Bytes from a number or a text with a unit; all else is refused as the wire does."""
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except UnitError as error:
            raise InvalidParams(f"{method}: {name}: {error}") from error
    check_param(method, name, value)
    return value
