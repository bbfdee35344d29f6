"""Whom a client speaks for, and who hears what the daemon says: its workers, and its callbacks.

Owns ``Crew``: which workers there are, in the order of their registration, and which callbacks.
Rules: every worker is registered over each new connection, but one that was stopped while there
was none; a ``revoke`` takes effect in the thread that read it, all callbacks run in the listener;
what a callback raises ends nothing.  The client's lock guards both, and is never held while the
daemon is asked or a callback runs.  Stays out: the connection, and what a worker's messages say.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from umad.client.link import Link
from umad.client.worker import Worker
from umad.errors import DaemonUnavailable, UmadError, WorkerRevoked
from umad.wire.messages import Notification

Callback = Callable[[dict[str, Any]], None]
logger = logging.getLogger("umad.client")


class Crew:
    """The workers and callbacks of one client.

    Args:
        lock: the client's.

    Attributes:
        lock: the same; in the child of a fork the client puts a new one here.
        workers: in the order of their registration; written here alone, under the lock.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self._callbacks: defaultdict[str, list[Callback]] = defaultdict(list)
        self.workers: Final[dict[Worker, None]] = {}

    def hear(self, method: str, callback: Callback) -> None:
        """Call it for each such notification, whoever that is about."""
        with self.lock:
            self._callbacks[method].append(callback)

    def add(self, worker: Worker) -> None:
        """Register it over each new connection from now on."""
        with self.lock:
            self.workers[worker] = None

    def forget(self, worker: Worker) -> None:
        """It is closed; do not register it again."""
        with self.lock:
            self.workers.pop(worker, None)

    def accounts(self) -> list[int | None]:
        """Of the workers: their slots in this process's account page."""
        with self.lock:
            return [worker.account for worker in self.workers]

    def bind(self, link: Link) -> bool:
        """Register those that this connection does not know; False: try again later."""
        with self.lock:
            unbound = [worker for worker in self.workers if not worker.bond.is_bound_to(link)]
        done = True
        for worker in unbound:
            try:
                worker.bond.bind(link)
            except DaemonUnavailable:
                return True  # the loss wakes the listener anyhow
            except WorkerRevoked as error:  # before the daemon restarted: it is not to come back
                self.forget(worker)
                if not worker.revoked.is_set():
                    told = {"reason": error.message, **error.details}
                    worker.revoke(told)
                    _call(worker.callbacks.get("revoke"), told)
                continue
            except UmadError as error:
                logger.warning("worker %s was not taken back: %s", worker.name, error.message)
                done = False
            with self.lock:
                gone = worker not in self.workers
            if gone:  # closed meanwhile
                worker.bond.unregister()
        return done

    def revoke(self, link: Link, note: Notification) -> None:
        """Stop whom a ``revoke`` is about, at once; its callbacks can wait for the listener."""
        with self.lock:
            for worker in self.workers:
                if worker.bond.is_bound_to(link, note.params.get("worker")):
                    worker.revoke(note.params)

    def tell(self, link: Link, note: Notification) -> None:
        """Run the callbacks for a notification: the client's, then those of whom it is about."""
        with self.lock:
            callbacks = [
                *self._callbacks.get(note.method, ()),
                *(
                    worker.callbacks.get(note.method)
                    for worker in self.workers
                    if worker.bond.is_bound_to(link, note.params.get("worker"))
                ),
            ]
        for callback in callbacks:
            _call(callback, note.params)

    def abandon(self) -> None:
        """In a forked child: the workers are the parent's."""
        for worker in self.workers:
            worker.bond.abandon()
        self.workers.clear()


def _call(callback: Callback | None, params: dict[str, Any]) -> None:
    if callback is not None:
        try:
            callback(params)
        except Exception:  # the user's code must not end the listener
            logger.exception("a callback failed")
