"""The client of the daemon for ordinary threads.

Owns the connection's life: connect, hello, reconnect with back-off, and what a fork does to it.
Every call has a deadline.  One background thread per client (the listener) reconnects, has the
workers registered again, ends leases that were leaked, and runs callbacks; calls do not pass
through it (see ``link``).  Whose workers and callbacks those are is ``crew``.
"""

import logging
import math
import os
import random
import select
import threading
import weakref
from collections.abc import Callable, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, Final, Literal, Self

from umad.client import caches
from umad.client.crew import Callback, Crew
from umad.client.dial import dial, not_running
from umad.client.link import Link
from umad.client.mailbox import Ended, Hold, Mailbox, Undo
from umad.client.worker import Worker
from umad.errors import (
    DaemonUnavailable,
    Fenced,
    LeaseExpired,
    LeaseNotFound,
    RequestRejected,
    UmadError,
)
from umad.values import SYSTEM_POOL
from umad.wire.messages import PROTOCOL_VERSION, Notification

DEFAULT_SOCKET: Final = "/run/umad/umad.sock"
SOCKET_VARIABLE: Final = "UMAD_SOCKET"
_PATIENCE_S: Final = 0.2  # how long a call waits for a reconnect that is under way
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0
_SEGMENTS_EVERY_S: Final = 10.0
_GONE: Final = (LeaseNotFound, LeaseExpired, Fenced)
logger = logging.getLogger("umad.client")
_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()

OnUnavailable = Literal["deny", "allow"]


def connect(
    socket_path: str | os.PathLike[str] | None = None,
    *,
    name: str = "python",
    timeout_s: float = 5.0,
    on_unavailable: OnUnavailable = "deny",
) -> "Client":
    """Connect to the daemon.

    Args:
        socket_path: where it listens; ``$UMAD_SOCKET`` or /run/umad/umad.sock where None.
        name: what the daemon calls this client in its log.
        timeout_s: the deadline of this and every later call, in seconds, beyond its ``wait_s``.
        on_unavailable: ``"deny"``: without a daemon nothing is granted (``DaemonUnavailable``).
            ``"allow"``: without a daemon everything is, unbooked, until one appears.

    Raises:
        DaemonUnavailable: nobody listens or answers; the message says how to start it.
        AccessDenied: this user may not use the socket; the message names the group to join.
        VersionMismatch: the daemon speaks another version of the protocol.
    """
    path = os.fspath(socket_path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
    return Client(path, name=name, timeout_s=timeout_s, on_unavailable=on_unavailable)


class Client:
    """A connection to the daemon that mends itself; thread-safe.  Made by ``connect``."""

    def __init__(
        self, path: str, *, name: str, timeout_s: float, on_unavailable: OnUnavailable
    ) -> None:
        self.path = path
        self.on_unavailable = on_unavailable
        self.timeout_s = timeout_s
        self._name = name
        self._new_locks()
        self._closing = threading.Event()
        self._crew = Crew(self._lock)
        self._segments_due_s = 0.0
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._problem: UmadError = DaemonUnavailable(not_running(path))
        self._start()
        _clients.add(self)

    @property
    def connected(self) -> bool:
        """A daemon answers at the moment."""
        link = self._link
        return link is not None and link.alive

    def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Ask the daemon and return its result.

        Args:
            method: a request of the protocol.
            params: its parameters; a ``wait_s`` among them extends the deadline.
            timeout_s: seconds until ``DaemonTimeout``; the client's where None.

        Raises:
            DaemonUnavailable: no daemon; also its children ``DaemonTimeout``, ``DaemonLost``.
            RequestRejected: the daemon refused; its child says why.
        """
        return self.call_on(self.current_link(), method, params or {}, timeout_s=timeout_s)

    def call_on(
        self,
        link: Link,
        method: str,
        params: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        fd: int | None = None,
    ) -> Any:
        """Like ``call``, over one particular connection: ids count only where they were given."""
        wait_s = params.get("wait_s") or 0
        patience_s = self.timeout_s if timeout_s is None else timeout_s
        return link.call(method, params, monotonic() + patience_s + wait_s, fd)

    def notify(self, method: str, params: Mapping[str, Any]) -> bool:
        """Tell the daemon something, without waiting; False when it was dropped."""
        link = self._link
        return link is not None and link.notify(method, params)

    def on(self, method: str, callback: Callback) -> None:
        """Have ``callback(params)`` run in the listener thread for each such notification."""
        self._crew.hear(method, callback)

    def worker(
        self,
        model: str,
        *,
        quota: int | str,
        peak: int | str | None = None,
        instance: int = 0,
        priority: int = 0,
        pin: bool = False,
        pool: str = SYSTEM_POOL,
        on_revoke: Callback | None = None,
        on_recycle: Callback | None = None,
        on_evict: Callback | None = None,
        on_evict_cancelled: Callback | None = None,
        on_load: Callback | None = None,
        on_queued: Callback | None = None,
        on_shrink: Callback | None = None,
    ) -> Worker:
        """Register one model instance; use it in a ``with`` statement or ``close`` it.

        Args:
            model: its name, 1 to 64 letters, digits, dots, dashes and underscores.
            quota: bytes it may hold once loaded; a number, or text with a unit ("40GiB").
            peak: bytes it may hold while it loads; the quota where None.
            instance: which copy of the model this is.
            priority: higher waits less, -1000 to 1000.
            pin: never to be evicted for another model.
            pool: the pool of memory it lives in.
            on_revoke: runs in the listener thread with the daemon's reasons, when this worker
                broke its quota and must stop.
            on_recycle: runs there too, and only has to note it: the model is to be loaded
                afresh, or its process started afresh, once it is idle (``recycle`` in
                PROTOCOL.md).
            on_evict: runs there too, and only has to note it: take no new work, unload as soon
                as what is at work is done.  A worker without it is never asked to go.
            on_evict_cancelled: as above: it need not go.
            on_load: as above: somebody wants the model loaded.
            on_queued: runs there with the reason, whenever something this worker asked for waits.
            on_shrink: as above: give back what is only kept warm; allocators' caches are already.

        Raises:
            InvalidParams: a value is not of its kind.
            DaemonUnavailable: no daemon, and ``on_unavailable`` is ``"deny"``.
            RequestRejected: the daemon refused.
        """
        callbacks = {
            "revoke": on_revoke,
            "recycle": on_recycle,
            "evict": on_evict,
            "evict_cancelled": on_evict_cancelled,
            "load": on_load,
            "queued": on_queued,
            "shrink": on_shrink,
        }
        worker = Worker(
            self,
            {
                "model": model,
                "instance": instance,
                "quota": quota,
                "peak": quota if peak is None else peak,
                "pool": pool,
                "priority": priority,
                "pin": pin,
                "thread": threading.get_native_id(),
                "recycle": on_recycle is not None,
                "evict": on_evict is not None,
            },
            {name: callback for name, callback in callbacks.items() if callback is not None},
        )
        try:
            worker.bond.bind(self.current_link())
        except DaemonUnavailable:
            if self.on_unavailable == "deny":
                raise
        self._crew.add(worker)
        self._mailbox.wake()  # the connection may have changed since
        return worker

    def report_segments(self, *, at_once: bool = False) -> None:
        """Tell the daemon how a device allocator's memory lies, every 10 s at most.

        Nothing is told in a process that uses no device, or has no worker.
        """
        if not self._crew.workers or (monotonic() < self._segments_due_s and not at_once):
            return
        self._segments_due_s = monotonic() + _SEGMENTS_EVERY_S
        segments = caches.device_segments()
        if segments is not None:
            self.notify("segments", segments)

    def close(self) -> None:
        """End the connection; the daemon takes back what this client still holds."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            link, thread = self._link, self._thread
        if link is not None:
            link.lose("this client was closed")
        self._mailbox.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- for the other modules of this package ---

    @property
    def lock(self) -> threading.Lock:
        """Guards what a reconnect swaps: bindings and holds."""
        return self._lock

    @property
    def closing(self) -> threading.Event:
        """Set by ``close``."""
        return self._closing

    @property
    def has_one(self) -> bool:
        """It has one worker."""
        return len(self._crew.workers) == 1

    @property
    def mailbox(self) -> Mailbox:
        """Where finalizers leave what they end."""
        return self._mailbox

    def current_link(self, patience_s: float = _PATIENCE_S) -> Link:
        """The live connection; waits for a reconnect for a moment.

        Raises:
            DaemonUnavailable: there is none.
        """
        link = self._link
        if link is not None and link.alive:
            return link
        self.wait_until(lambda: self.connected, patience_s)
        link = self._link
        if link is None or not link.alive:
            raise DaemonUnavailable(
                "this client was closed" if self._closing.is_set() else self._problem.message
            )
        return link

    def wait_until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Wait for a reconnect to make ``condition`` true; not at all in the listener."""
        if condition():
            return True
        if self._thread is None and not self._closing.is_set():  # a fork took it
            with self._starting:
                if self._thread is None:
                    self._start()
        if threading.current_thread() is self._thread or self.on_unavailable == "allow":
            return condition()
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self._closing.is_set(), patience_s)

    def changed(self) -> None:
        """Wake those in ``wait_until``."""
        with self._changed:
            self._changed.notify_all()

    def forget(self, worker: Worker) -> None:
        """The worker is closed; do not register it again."""
        self._crew.forget(worker)

    def end(self, hold: Hold, *, leaked: bool, method: str = "release") -> None:
        """End a lease, now or, without a connection, as soon as there is one."""
        with self._lock:
            link, lease, token = self._link, hold.lease, hold.token
            if hold.mailbox is not self._mailbox or lease is None:
                return  # the parent's, or never booked
            if link is not None and link.alive and hold.generation != link.generation:
                return  # the daemon that granted it has gone, and its books with it
        try:
            if link is None:
                raise DaemonUnavailable("not connected")
            self.call_on(link, method, {"lease": lease, "token": token, "leaked": leaked})
        except DaemonUnavailable:
            self._mailbox.put(Ended(hold, leaked))
        except _GONE as error:  # it had ended before; that is all that was wanted
            logger.debug("lease %d: %s", lease, error.message)

    def extend(self, hold: Hold) -> float:
        """Have a burst lease last longer; seconds from now.  Infinite: nobody ends it in time."""
        with self._lock:
            link, ticket = self._link, hold.ticket
            booked = link is not None and link.generation == hold.generation
        if link is None or not booked or hold.lease is None:
            return _PATIENCE_S if hold.lease is not None else math.inf
        try:
            return float(self.call_on(link, "extend", ticket)["deadline_s"])
        except DaemonUnavailable:
            return _PATIENCE_S  # a moment later: a new daemon books it anew, for its whole time
        except RequestRejected as error:  # it has ended: what is held beyond the quota stays booked
            logger.warning("a burst of %d bytes was not extended: %s", hold.bytes, error.message)
            return math.inf

    # --- the connection ---

    def _new_locks(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._starting = threading.Lock()

    def _start(self) -> None:
        self._mailbox = Mailbox()
        self._epoll = select.epoll()
        self._epoll.register(self._mailbox.fd, select.EPOLLIN)
        try:
            self._link = self._open()
        except UmadError as error:
            self._problem = error
            if self.on_unavailable == "deny" or not isinstance(error, DaemonUnavailable):
                self._dispose()
                raise
        self._thread = threading.Thread(target=self._listen, name="umad-client", daemon=True)
        self._thread.start()

    def _open(self) -> Link:
        deadline_s = monotonic() + self.timeout_s
        link = Link(
            dial(self.path, self.timeout_s),
            self._epoll,
            self._on_notification,
            self._on_late,
            self._mailbox.wake,
        )
        try:
            hello = {"versions": [PROTOCOL_VERSION], "client": self._name}
            link.generation = int(link.call("hello", hello, deadline_s)["generation"])
        except BaseException:
            link.dispose()
            raise
        return link

    def _dispose(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.dispose()
        self._epoll.close()
        self._mailbox.close()

    def _listen(self) -> None:
        retry_s: float | None = None
        try:
            while not self._closing.is_set():
                # A loss that pump() saw has woken us already, and take() ate the wake-up.
                if self.connected:
                    self._epoll.poll(retry_s)
                if not self.connected:
                    self._reconnect()
                if (link := self._link) is not None:
                    link.pump()
                    retry_s = None if self._crew.bind(link) else _BACKOFF_MAX_S
                self._work_off()
        finally:
            self._dispose()

    def _reconnect(self) -> None:
        if (old := self._link) is not None:
            old.dispose()
        backoff_s = _BACKOFF_MIN_S
        while not self._closing.is_set():
            try:
                link = self._open()
            except UmadError as error:
                self._problem = error
            else:
                with self._changed:
                    self._link = link
                    self._changed.notify_all()
                return
            self._closing.wait(random.uniform(backoff_s / 2, backoff_s))
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _work_off(self) -> None:
        for item in self._mailbox.take():
            try:
                if isinstance(item, Ended):
                    self.end(item.hold, leaked=item.leaked)
                elif isinstance(item, Undo):
                    self.call_on(item.link, item.method, item.params)
                else:
                    self._hear(*item)
            except UmadError as error:
                logger.warning("%s was refused: %s", type(item).__name__.lower(), error.message)

    def _hear(self, link: Link, note: Notification) -> None:
        if note.method == "shrink":  # what is only kept warm goes, and how the rest lies is told
            caches.release(self._crew.accounts())
            self.report_segments(at_once=True)
        self._crew.tell(link, note)

    def _on_notification(self, link: Link, note: Notification) -> None:
        if note.method == "revoke":  # at once; the callbacks can wait for the listener
            self._crew.revoke(link, note)
        self._mailbox.put((link, note))

    def _on_late(self, link: Link, method: str, params: Mapping[str, Any], result: Any) -> None:
        """An answer whose caller has given up: give back what it granted."""
        if isinstance(result, Mapping):
            undo = Undo.of(link, method, params, result)
            if undo is not None:
                self._mailbox.put(undo)

    def forked(self) -> None:
        """In the child of a fork: leave the parent's connection and workers alone."""
        self._new_locks()  # another thread of the parent may have held the old ones
        self._crew.lock = self._lock
        if self._closing.is_set() or self._thread is None:
            return
        self._closing = threading.Event()
        self._thread = None
        self._epoll.close()
        self._mailbox.close()
        if self._link is not None:
            self._link.abandon()
            self._link = None
        self._crew.abandon()


def _forked() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_forked)
