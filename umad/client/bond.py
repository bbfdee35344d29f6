"""A worker's registration with whichever daemon there is now.

Owns the worker's id and where it counts, its account, the leases that a registration tells of,
and every message about the worker.  A reconnect swaps ids, leases and tokens here, behind the
objects that people hold.
Rule: without a daemon nothing new is granted unless the client allows it; work within what was
granted goes on.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from umad.client.accounts import process_page
from umad.client.kept import Kept
from umad.client.link import Link
from umad.client.mailbox import Ended, Hold
from umad.errors import DaemonUnavailable, LeaseNotFound, Recovering, RequestRejected
from umad.wire.messages import check_params

if TYPE_CHECKING:
    from umad.client.blocking import Client
    from umad.client.loading import Load

logger = logging.getLogger("umad.client")
_PATIENCE_S: Final = 0.2  # how long a burst waits for a reconnect that is under way


@dataclass(frozen=True, slots=True)
class Binding:
    """A worker's id, and the only connection where that id means this worker."""

    link: Link
    worker: int


class Bond:
    """The registration of one worker.

    Attributes:
        name: ``llama``, or ``llama/1`` for the second instance.
        registration: the parameters it registers with, checked.
        binding: None while it is not registered.
        account: its slot in this process's account page; None where no guard enforces its quota.
        kept: its model, and the lease of that.
        load: of the load that has begun, written under the client's lock.
    """

    def __init__(self, client: "Client", registration: Mapping[str, Any]) -> None:
        self._client = client
        self.registration = check_params("register", registration)
        model, instance = self.registration["model"], self.registration["instance"]
        self.name: str = f"{model}/{instance}" if instance else model
        self.binding: Binding | None = None
        self.account: int | None = None
        self.kept = Kept()
        self.load: Load | None = None
        self.baseline: int | None = None
        self._bursts: list[Hold] = []  # of the forwards at work, and some that have ended
        self._foreign = False

    @property
    def bound(self) -> bool:
        """It is registered over a live connection."""
        binding = self.binding
        return binding is not None and binding.link.alive

    def bind(self, link: Link) -> None:
        """Register over a connection, with what the worker holds already.

        Raises:
            RequestRejected: the daemon refused.
            DaemonUnavailable: it did not answer.
        """
        params = dict(self.registration)
        page_fd = self._tell_guard(params)
        with self._client.lock:
            self.binding = None  # no load may begin that this registration does not tell of
            model, load = self.kept.live(), self.load
            hold = model if model is not None or load is None else load.hold
            if hold is not None:
                params["held" if hold is model else "loading"] = hold.bytes
        if hold is not None and self.baseline is not None:
            params["baseline"] = self.baseline
        bursts = [
            one for one in self._bursts if not one.ended and one.generation != link.generation
        ]
        if model is not None and bursts:  # granted by a daemon that is gone
            params["bursts"] = [one.bytes for one in bursts]
        answer = self._client.call_on(link, "register", params, fd=page_fd)
        slot = answer.get("account")
        received = link.take_fd()
        if received is not None and not process_page.attach(received):
            slot = None
        booked = [*zip(bursts, answer.get("bursts", ()), strict=False)]
        if hold is not None and (hold is model or "lease" in answer):  # else the old one counts
            booked.append((hold, answer))
        mutex = answer.get("init_token")
        with self._client.lock:
            self.account = slot
            self.binding = binding = Binding(link, answer["worker"])
            self.baseline = answer["baseline"]
            for each, again in booked:
                each.take(link.generation, again)
            if load is not None and self.load is load:
                load.mutex, mutex = mutex, None
            loaded = hold is not model and hold is self.kept.live()
        self._catch_up(binding, hold if loaded else None, mutex, [each for each, _ in booked])
        self._client.changed()

    def _tell_guard(self, params: dict[str, Any]) -> int | None:
        """Whether a guard enforces its quota here, and the page that it had before."""
        if process_page.active:
            params["guard"] = True
            if self.account is not None:
                params["account"] = self.account
                return process_page.fd
        elif process_page.off:
            params["guard_off"] = process_page.off[:200]
        return None

    def _catch_up(
        self, binding: Binding, loaded: Hold | None, mutex: int | None, booked: list[Hold]
    ) -> None:
        """Tell the daemon what has happened while it was registered with.

        Args:
            binding: the new one.
            loaded: the lease of a load that was under way, and is a model now.
            mutex: given to a load that has ended.
            booked: what it has booked; some may have ended, when there was nothing to give back.
        """
        if loaded is not None:
            told = {**loaded.ticket, "measured": loaded.bytes}
            self._client.call_on(binding.link, "commit", told)
        if mutex is not None:
            self.settle(binding, "init_unlock", {"token": mutex})
        for each in booked:
            if each.ended:
                self._client.mailbox.put(Ended(each, leaked=False))

    def is_bound_to(self, link: Link, worker: int | None = None) -> bool:
        """Whether it is registered over this connection (as this number)."""
        binding = self.binding
        return (
            binding is not None
            and binding.link is link
            and (worker is None or binding.worker == worker)
        )

    def unregister(self) -> None:
        """Tell the daemon that the worker has ended; a lost connection has told it."""
        binding, self.binding = self.binding, None
        if binding is not None:
            self.settle(binding, "unregister", {})

    def abandon(self) -> None:
        """In a forked child: the worker is the parent's."""
        self.binding, self._foreign = None, True

    def require(self, patience_s: float = _PATIENCE_S) -> Binding | None:
        """The binding over a live connection; None: there is no daemon and that is allowed.

        Raises:
            LeaseNotFound: this is a forked child.
            DaemonUnavailable: there is no daemon, or it has not taken the worker back.
        """
        if self._foreign:
            raise LeaseNotFound(
                f"worker {self.name} belongs to the parent process; register one in this process"
            )
        self._client.wait_until(lambda: self.bound, patience_s)
        if self.bound:
            return self.binding
        if self._client.on_unavailable == "deny":
            self._client.current_link(0)  # says why; it was waited for
            raise DaemonUnavailable(f"the umad daemon has not taken worker {self.name} back yet")
        return None

    def ask(
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

    def book(
        self, binding: Binding | None, method: str, params: dict[str, Any]
    ) -> tuple[Hold, Mapping[str, Any]]:
        """Ask for ``bytes``: the lease, and the answer; without a daemon one that nobody booked."""
        hold = Hold(self._client.mailbox, 0, None, 0, params["bytes"])
        answer = self.ask(binding, method, params)
        if binding is None or answer is None:
            return hold, {}
        hold.take(binding.link.generation, answer)
        return hold, answer

    def lend(self, hold: Hold) -> None:
        """A burst is at work; a registration tells of it until it has ended."""
        if hold.lease is not None:
            with self._client.lock:
                self._bursts = [*(one for one in self._bursts if not one.ended), hold]

    def settle(self, binding: Binding | None, method: str, params: dict[str, Any]) -> None:
        """End something; what the daemon has ended already, or lost with us, is ended too."""
        if binding is None:
            return
        try:
            self._client.call_on(binding.link, method, {"worker": binding.worker, **params})
        except (DaemonUnavailable, RequestRejected) as error:
            logger.debug("worker %s: %s: %s", self.name, method, error.message)

    def report(self, method: str, params: dict[str, Any]) -> bool:
        """Send a notification about this worker; False when it was dropped."""
        binding = self.binding
        if binding is None:
            return False
        params["worker"] = binding.worker
        return binding.link.notify(method, params)
