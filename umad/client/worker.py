"""A model instance under contract: load, forward, burst, unload.

Owns the order in which a well-behaved worker talks to the daemon, and that whatever was booked
is given back exactly once: by the normal path, or by a finalizer that knows only a plain token
(``mailbox.Hold``).  A reconnect swaps ids and tokens behind the objects here.
Rule: without a daemon nothing new is granted unless the client allows it; work within what was
granted goes on.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from umad.client.accounts import process_page
from umad.client.burst import Burst, Forward
from umad.client.cores import cap_threads
from umad.client.interrupt import Interruptible
from umad.client.kept import Kept
from umad.client.link import Link
from umad.client.mailbox import Ended, Hold
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
    DaemonUnavailable,
    InvalidParams,
    LeaseNotFound,
    QuotaExceeded,
    Recovering,
    RequestRejected,
    WorkerRevoked,
)
from umad.guard.account import SHARED, account
from umad.units import UnitError, parse_bytes
from umad.wire.messages import check_param, check_params

if TYPE_CHECKING:
    from umad.client.blocking import Client

T = TypeVar("T")
logger = logging.getLogger("umad.client")
_PATIENCE_S: Final = 0.2  # how long a burst waits for a reconnect that is under way
_LOAD_WAIT_S: Final = 300.0
_BURST_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Binding:
    """A worker's id, and the only connection where that id means this worker."""

    link: Link
    worker: int


@dataclass(slots=True)
class _Booking:
    """What a load under way has booked; without a daemon both are None."""

    binding: Binding | None
    lease: dict[str, Any] | None


class Worker:
    """One registered model instance; made by ``Client.worker``.

    Attributes:
        name: ``llama``, or ``llama/1`` for the second instance.
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
        self._registration = check_params("register", {**registration, **sizes})
        self._client = client
        self._binding: Binding | None = None
        self._baseline: int | None = None
        self._account: int | None = None
        self._interruptible = Interruptible()
        self.meter = Meter()
        self._computing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._foreign = False
        self._kept = Kept()
        self._bursts: list[Hold] = []  # of the forwards at work, and some that have ended
        model, instance = self._registration["model"], self._registration["instance"]
        self.name: str = f"{model}/{instance}" if instance else model
        self.revoked = threading.Event()
        self._told: Mapping[str, Any] = {}
        self.callbacks: Final = callbacks

    @property
    def account(self) -> int | None:
        """Its slot in this process's account page; None where no guard enforces its quota."""
        return self._account

    @property
    def id(self) -> int | None:
        """The daemon's number for it now; None without a daemon."""
        binding = self._binding
        return None if binding is None else binding.worker

    @property
    def loaded(self) -> bool:
        """It has a model."""
        return self._kept.live() is not None

    @property
    def held_bytes(self) -> int:
        """What the loaded model was measured to hold; 0 without one."""
        hold = self._kept.live()
        return 0 if hold is None else hold.bytes

    @property
    def account_bytes(self) -> int:
        """What its account holds now; 0 without a guard."""
        slot = self._account
        return 0 if slot is None else process_page.used(slot)

    @property
    def grown_bytes(self) -> int:
        """What its account holds beyond what the load was measured at; 0 without a guard."""
        return max(0, self.account_bytes - self.held_bytes)

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
            peak: bytes to book while loading, where not those of the registration.
            evict: idle models may be asked to go for this one while it waits for room.

        Raises:
            QuotaDenied, WaitedTooLong: there was no room in time.
            QuotaExceeded: the model holds more than its quota; it was dropped.
            WorkerRevoked: the worker was stopped while it loaded.
            DaemonUnavailable: no daemon, and the client does not allow that.
        """
        if self._kept.live() is not None:
            raise InvalidParams(f"worker {self.name} has a model; unload it first")
        self.check_revoked()
        self.meter = Meter()
        binding = self._bound()
        size = self._registration["peak"] if peak is None else _size("reserve", "bytes", peak)
        answer = self._reserve(binding, size, wait_s, evict=evict)
        booking = _Booking(binding, _ticket(answer))
        try:
            fence = self._ask(binding, "init_lock", {"wait_s": wait_s})
            model: T | None = None
            try:
                give_back(self._account)  # or the model moves into pages that were counted before
                if answer is not None and answer.get("prefault", False):
                    prefault(size, self.check_revoked)
                before = self._holds()
                with self.running():
                    model = loader()
                give_back(self._account)  # what only the loading needed is not the model's
                measured = max(self._holds() - before, 0)
                self.check_revoked()
                hold = self._commit(booking, measured)
            except BaseException as error:
                # Its bytes must be gone before the books say so.
                model = None
                forget_frames(error)
                give_back(self._account)
                raise
            finally:
                if fence is not None:
                    self._settle(binding, "init_unlock", {"token": fence["token"]})
        except BaseException:
            if booking.lease is not None:
                self._settle(booking.binding, "void", booking.lease)
            raise
        self._kept.keep(model, hold)
        if self._binding is not booking.binding:
            # A reconnect registered us before it could know of this model: do it once more.
            self.unregister()
            self._client.mailbox.wake()
        return model

    def unload(self) -> int:
        """Give the model's memory back.  Empty the loaded object first, or drop it right after.

        An object that was dropped before has been reported as leaked, and its lease released.

        Returns:
            Bytes by which the process shrank; 0 without a model.
        """
        hold = self._kept.let_go()
        if hold is None:
            return 0
        before = process_bytes()
        give_back(self._account)
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
        binding = self._bound()
        answer = self._ask(binding, "admit", params)
        if answer is None or binding is None:
            return Burst(self._client, Hold(self._client.mailbox, 0, None, 0, size))
        hold = self._hold_of(binding, answer, size)
        with self._client.lock:
            self._bursts = [*(one for one in self._bursts if not one.ended), hold]
        return Burst(self._client, hold)

    def progress(self, stage: str, ratio: float) -> None:
        """Tell people how far a load is: a stage ("reading", "building", ...) and 0 to 1.

        Raises:
            InvalidParams: ``stage`` is empty or long, or ``ratio`` is out of range.
        """
        report = {"worker": 0, "stage": stage, "ratio": ratio}
        check_params("progress", report)  # nobody answers a notification
        self.report("progress", report)

    def set_quota(self, quota: int | str, peak: int | str) -> None:
        """Change its steady quota and load peak; a loaded model's booking follows at once.

        Args:
            quota: bytes it may hold once loaded; less than it holds now puts it in breach.
            peak: bytes it may hold while it loads; in effect from the next registration on.

        Raises:
            AccessDenied: only members of the admin group may.
            QuotaDenied: there is no room for that much more.
            DaemonUnavailable: no daemon, and the client does not allow that.
        """
        sizes = {
            "quota": _size("set_quota", "quota", quota),
            "peak": _size("register", "peak", peak),
        }
        self._ask(self._bound(), "set_quota", {"quota": sizes["quota"]})
        self._registration = check_params("register", {**self._registration, **sizes})

    def keep(self) -> bool:
        """Somebody wants this model, which the daemon has asked to go.

        The daemon spares it where another can go in its place, and says so (``evict_cancelled``);
        else it still has to go.

        Returns:
            False when the daemon could not be told.
        """
        return self.report("keep", {})

    def close(self) -> None:
        """Unregister; the daemon takes back what the worker holds, once it is seen to be gone."""
        self._client.forget(self)
        self._kept.let_go()
        self.unregister()

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
        slot = self._account
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
                    details={"worker": self.name, "quota_bytes": self._registration["quota"]},
                ) from error

    def interrupt(self) -> None:
        """A courtesy to the thread that works for this worker: ``WorkerRevoked``, soon.

        It does not reach a thread inside a C call before that returns; the guard and the
        daemon do not wait for it.
        """
        self._interruptible.interrupt()

    def bind(self, link: Link) -> None:
        """Register over a connection, with what the worker holds already."""
        params = dict(self._registration)
        page_fd = None
        if process_page.active:
            params["guard"] = True
            if self._account is not None:
                params["account"], page_fd = self._account, process_page.fd
        elif process_page.off:
            params["guard_off"] = process_page.off[:200]
        hold = self._kept.live()
        if hold is not None:
            params["held"] = hold.bytes
            if self._baseline is not None:
                params["baseline"] = self._baseline
        bursts = [
            one for one in self._bursts if not one.ended and one.generation != link.generation
        ]
        if hold is not None and bursts:  # granted by a daemon that is gone
            params["bursts"] = [one.bytes for one in bursts]
        answer = self._client.call_on(link, "register", params, fd=page_fd)
        slot = answer.get("account")
        received = link.take_fd()
        if received is not None and not process_page.attach(received):
            slot = None
        with self._client.lock:
            self._account = slot
            self._binding = Binding(link, answer["worker"])
            self._baseline = answer["baseline"]
            if hold is not None:
                hold.generation = link.generation
                hold.lease, hold.token = answer.get("lease"), answer.get("token") or 0
            for burst, again in zip(bursts, answer.get("bursts", ()), strict=False):
                burst.generation = link.generation
                burst.lease, burst.token = (again["lease"], again["token"]) if again else (None, 0)
        for each in bursts if hold is None else [hold, *bursts]:
            if each.ended:  # meanwhile, when there was nothing yet to give back
                self._client.mailbox.put(Ended(each, leaked=False))
        self._client.changed()

    def is_bound_to(self, link: Link, worker: int | None = None) -> bool:
        """Whether it is registered over this connection (as this number)."""
        binding = self._binding
        return (
            binding is not None
            and binding.link is link
            and (worker is None or binding.worker == worker)
        )

    def unregister(self) -> None:
        """Tell the daemon that the worker has ended; a lost connection has told it."""
        binding, self._binding = self._binding, None
        if binding is not None:
            self._settle(binding, "unregister", {})

    def abandon(self) -> None:
        """In a forked child: the worker is the parent's."""
        self._binding, self._foreign = None, True

    def report(self, method: str, params: dict[str, Any]) -> bool:
        """Send a notification about this worker; False when it was dropped."""
        binding = self._binding
        if binding is None:
            return False
        params["worker"] = binding.worker
        return binding.link.notify(method, params)

    def finish(self, burst: Burst, report: dict[str, Any]) -> None:
        """Report a forward, which ends its burst lease in the same message."""
        hold = burst.detach()
        if hold is None or hold.lease is None:
            self.report("forward_done", report)
            return
        binding = self._binding
        if binding is not None and binding.link.generation == hold.generation:
            ended = {**report, "lease": hold.lease, "token": hold.token}
            if self.report("forward_done", ended):
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

    def _bound(self, patience_s: float = _PATIENCE_S) -> Binding | None:
        """The binding over a live connection; None: there is no daemon and that is allowed."""
        if self._foreign:
            raise LeaseNotFound(
                f"worker {self.name} belongs to the parent process; register one in this process"
            )
        self._client.wait_until(self._is_bound, patience_s)
        if self._is_bound():
            return self._binding
        if self._client.on_unavailable == "deny":
            self._client.current_link()  # says why
            raise DaemonUnavailable(f"the umad daemon has not taken worker {self.name} back yet")
        return None

    def _is_bound(self) -> bool:
        binding = self._binding
        return binding is not None and binding.link.alive

    def _ask(
        self, binding: Binding | None, method: str, params: dict[str, Any]
    ) -> dict[str, Any] | None:
        """A call about this worker; None: there is no daemon and that is allowed."""
        if binding is None:
            return None
        deadline_s = monotonic() + params.get("wait_s", 0)
        params["worker"] = binding.worker
        while True:
            try:
                answer: dict[str, Any] = self._client.call_on(binding.link, method, params)
            except Recovering as error:  # it has just started; it will not be long
                left_s = deadline_s - monotonic()
                pause_s = min(error.retry_after_s or _PATIENCE_S, left_s)
                if pause_s <= 0 or self._client.closing.wait(pause_s):
                    raise
                params["wait_s"] = max(deadline_s - monotonic(), 0)
            except DaemonUnavailable:
                if self._client.on_unavailable == "deny":
                    raise
                return None
            else:
                return answer

    def _settle(self, binding: Binding | None, method: str, params: dict[str, Any]) -> None:
        """End something; what the daemon has ended already, or lost with us, is ended too."""
        if binding is None:
            return
        if method != "void":
            params = {"worker": binding.worker, **params}
        try:
            self._client.call_on(binding.link, method, params)
        except (DaemonUnavailable, RequestRejected) as error:
            logger.debug("worker %s: %s: %s", self.name, method, error.message)

    def _holds(self) -> int:
        """Bytes to measure a load by: the account's where there is one, the process's else."""
        return process_bytes() if self._account is None else process_page.used(self._account)

    def _reserve(
        self, binding: Binding | None, size: int, wait_s: float, *, evict: bool
    ) -> dict[str, Any] | None:
        params = {"bytes": size, "wait_s": wait_s, "evict": evict}
        return self._ask(binding, "reserve", params)

    def _commit(self, booking: _Booking, measured: int) -> Hold:
        """Shrink the booking to what was measured."""
        client = self._client
        binding, lease = booking.binding, booking.lease
        if binding is not None and lease is not None:
            try:
                client.call_on(binding.link, "commit", {**lease, "measured": measured})
                return self._hold_of(binding, lease, measured)
            except DaemonUnavailable:
                if binding.link.alive:  # only late: the books may hold it, so it must be voided
                    raise
            again = self._bound(client.timeout_s)
            if again is not None and again.link.generation == binding.link.generation:
                booking.binding = again  # it was taken back with its booking
                client.call_on(again.link, "commit", {**lease, "measured": measured})
                return self._hold_of(again, lease, measured)
        # The daemon restarted while we loaded: the new one knows nothing of it.  Book what is
        # there; throwing away minutes of loading would help nobody.
        booking.binding, booking.lease = self._bound(client.timeout_s), None
        quota = self._registration["quota"]
        answer = self._reserve(booking.binding, quota, client.timeout_s, evict=False)
        booking.lease = _ticket(answer)
        if booking.binding is None or booking.lease is None:
            return Hold(client.mailbox, 0, None, 0, measured)
        client.call_on(booking.binding.link, "commit", {**booking.lease, "measured": measured})
        return self._hold_of(booking.binding, booking.lease, measured)

    def _hold_of(self, binding: Binding, answer: Mapping[str, Any], size: int) -> Hold:
        generation = binding.link.generation
        return Hold(self._client.mailbox, generation, answer["lease"], answer["token"], size)


def _ticket(answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What names a lease in later calls."""
    return None if answer is None else {"lease": answer["lease"], "token": answer["token"]}


def _size(method: str, name: str, value: int | str) -> int:
    """Bytes from a number or a text with a unit; all else is refused as the wire does."""
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except UnitError as error:
            raise InvalidParams(f"{method}: {name}: {error}") from error
    check_param(method, name, value)
    return value
