"""Faults to be planted in the core, each for as long as its ``with`` lasts.

The simulator has to find every one of them by a rule of the judge's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, Final
from unittest.mock import patch

from tests.simulation.run import Plant
from umad.core import grants, requests, switching
from umad.core.eviction import Candidate
from umad.core.ledger import Ledger
from umad.core.membership import Call
from umad.core.mutex import InitMutex
from umad.core.state import Member, State
from umad.core.waiting import Queue, Waiter
from umad.errors import LeaseNotFound
from umad.values import Lease, LeaseState


@contextmanager
def double_release() -> Iterator[None]:
    """A second ``release`` of a lease is taken, and frees its bytes a second time."""

    def any_lease(state: State, call: Call) -> Lease:
        lease = state.ledger.leases.get(call.params["lease"])
        if lease is None:
            raise LeaseNotFound("no such lease")
        return lease

    def release(ledger: Ledger, lease: Lease) -> Lease:
        if lease.state is LeaseState.RELEASING:
            ledger._resize(lease, 0)
            return lease
        return real(ledger, lease)

    real = Ledger.release
    with patch.object(requests, "_lease", any_lease), patch.object(Ledger, "release", release):
        yield


@contextmanager
def lost_waiter() -> Iterator[None]:
    """Now and then one that was told to wait is forgotten."""

    def add(queue: Queue, waiter: Waiter) -> int:
        position = real(queue, waiter)
        if next(calls) % 20 == 19:
            queue.remove(waiter)
        return position

    real, calls = Queue.add, count()
    with patch.object(Queue, "add", add):
        yield


@contextmanager
def lost_wake_up() -> Iterator[None]:
    """What comes free is given to nobody who waits."""

    def pump(_state: State, _now_s: float) -> Iterator[Any]:
        return iter(())

    with patch.object(grants, "pump", pump):
        yield


@contextmanager
def boundless_passing() -> Iterator[None]:
    """The small pass the large for ever."""
    with patch.object(switching, "may_be_passed", lambda *_: True):
        yield


@contextmanager
def eviction_cycle() -> Iterator[None]:
    """Models go for each other without residence and rest."""

    def candidates(state: State, rival: Member | None, now_s: float) -> list[Candidate]:
        return [replace(one, from_s=0.0) for one in real(state, rival, now_s)]

    real = switching.candidates
    with patch.object(switching, "candidates", candidates):
        yield


@contextmanager
def stale_tokens() -> Iterator[None]:
    """A lease's token is not looked at, nor which daemon gave it out."""

    def any_token(state: State, call: Call) -> Lease:
        lease = state.ledger.leases.get(call.params["lease"])
        if lease is None or lease.state is LeaseState.RELEASING:
            raise LeaseNotFound("no such lease")
        return lease

    with patch.object(requests, "_lease", any_token):
        yield


@contextmanager
def mutex_without_token() -> Iterator[None]:
    """A former holder's word opens the mutex like the present one's."""

    def give_back(mutex: InitMutex, _worker: int, _token: int) -> bool:
        mutex._holder = None
        return True

    with patch.object(InitMutex, "give_back", give_back):
        yield


@contextmanager
def grant_in_recovery() -> Iterator[None]:
    """The daemon grants before its former workers are back."""
    with patch.object(State, "recovering", lambda _state, _now_s: False):
        yield


@contextmanager
def load_as_asked() -> Iterator[None]:
    """A load books what its client asks for, whatever its quota has become."""

    def reserve(state: State, call: Call) -> Iterator[Any]:
        member = state.members[call.params["worker"]]
        quota, asked = member.worker.quota, call.params.get("bytes", member.worker.peak)
        member.worker = replace(member.worker, quota=min(quota, asked))
        try:
            yield from real(state, call)
        finally:
            member.worker = replace(member.worker, quota=quota)

    def commit(ledger: Ledger, lease: Lease, size: int) -> Lease:
        return kept(ledger, lease, min(size, lease.bytes))

    real, kept = requests.reserve, Ledger.commit
    with patch.dict(requests.HANDLERS, reserve=reserve), patch.object(Ledger, "commit", commit):
        yield


PLANTS: Final[Mapping[str, Plant]] = {
    "double release": double_release,
    "lost waiter": lost_waiter,
    "lost wake-up": lost_wake_up,
    "starved": boundless_passing,
    "eviction": eviction_cycle,
    "fenced write": stale_tokens,
    "fenced unlock": mutex_without_token,
    "recovery": grant_in_recovery,
    "oversold": load_as_asked,
}
