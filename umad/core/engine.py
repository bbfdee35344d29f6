"""One object that turns what happens into what is to be done.

The loop tells the engine of connections, messages, snapshots, exits and the passing of time;
each call returns actions and leaves the books whole.  The fixed order of one look at memory:

1. budgets follow the machine;
2. released bytes that are seen to be gone are freed;
3. processes over their limit are found, the watchdog decides;
4. deadlines pass: leases, waits, the mutex, cut-off workers;
5. who waits is granted what is there, or models are asked to go for it;
6. the invariants are checked;
7. a new reading of how free memory lies moves the ladder against fragmentation;
8. pages that have moved behind the books are told of.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from umad.config import Settings
from umad.core import (
    deadlines,
    enforcement,
    grants,
    kin,
    ladder,
    membership,
    migration,
    outside,
    pressure,
    report,
    requests,
    returning,
    room,
    switching,
)
from umad.core.access import METHODS, Access
from umad.core.actions import Action, Event, Look, Notify, Refuse, RememberStop, Unwatch
from umad.core.audit import ProcessBooks, breaches, still_there
from umad.core.pace import Pace, fastest, pace
from umad.core.state import Client, State
from umad.errors import AccessDenied, RequestRejected, UnknownMethod
from umad.values import (
    SYSTEM_POOL,
    AccountFigures,
    Identity,
    LeaseKind,
    Outsider,
    PageFigures,
    Peer,
    ProcessReading,
    Snapshot,
)

# How long a fast pace is worth it; after that the bytes come at the ordinary pace.
FAST_FOR_S: Final = 5.0
# A child that is not known yet may be there for this long.
SEARCH_EVERY_S: Final = 1.0


class Engine:
    """See the module.  ``now_s`` is monotonic everywhere; ``unix_offset_s`` dates the events."""

    def __init__(
        self,
        settings: Settings,
        access: Access,
        *,
        generation: int,
        recovering_until_s: float,
        unix_offset_s: float = 0.0,
        fill_rate: int = 0,
    ) -> None:
        self.state = State(settings, access, generation, recovering_until_s)
        self.state.fill_rate = fill_rate
        self._earlier: Snapshot | None = None
        self._books: list[ProcessBooks] = []  # as the last look has left them
        self._fast_until_s = 0.0
        self._search_s = 0.0
        self.unix_offset_s = unix_offset_s

    # ------------------------------------------------------------ connections

    def connected(self, connection: int, peer: Peer) -> list[Action]:
        """A peer has connected."""
        permission = self.state.access.of(peer)
        self.state.clients[connection] = Client(connection, peer, permission)
        return []

    def disconnected(self, connection: int, now_s: float) -> list[Action]:
        """A connection has ended; its workers have a moment to come back, or to die."""
        client = self.state.clients.pop(connection, None)
        if client is None:
            return []
        for queue in self.state.queues:
            for waiter in queue.pop_connection(connection):
                grants.waits_no_more(self.state, waiter.worker)
        for key in client.workers:
            member = self.state.members[key]
            member.client = None
            if not self.state.processes[member.worker.identity].outside:
                member.cut_off_s = now_s
            self.state.mutex.take_away(key)
        return self._record(self._served(now_s), now_s)

    def request(
        self,
        connection: int,
        request: int,
        method: str,
        params: Mapping[str, Any],
        now_s: float,
        process: ProcessReading | None = None,
        outsider: Outsider | None = None,
    ) -> list[Action]:
        """A request; exactly one Reply or Refuse for it comes now or later."""
        client = self.state.clients[connection]
        call = membership.Call(client, request, params, now_s, process, outsider)
        try:
            actions = self._handle(method, call)
        except RequestRejected as error:
            self.state.counters["refusals_" + error.code] += 1
            return [Refuse(connection, request, error)]
        return self._record(actions, now_s)

    def notification(
        self, connection: int, method: str, params: Mapping[str, Any], now_s: float
    ) -> list[Action]:
        """A one-way message; a refusal is counted, there is nobody to tell."""
        call = membership.Call(self.state.clients[connection], None, params, now_s)
        try:
            return self._record(self._handle(method, call), now_s)
        except RequestRejected as error:
            self.state.counters["refusals_" + error.code] += 1
            return []

    def _handle(self, method: str, call: membership.Call) -> list[Action]:
        handler = requests.HANDLERS.get(method)
        if handler is None:
            raise UnknownMethod(f"the daemon has no method {method!r}")
        self.check_allowed(call.client.id, method)
        actions = list(handler(self.state, call))
        if method in ("register", "adopt"):
            self._search_s = call.now_s
        if method in _FREEING:
            self._fast_until_s = call.now_s + FAST_FOR_S
            actions.extend(self._served(call.now_s))
        if method in _QUEUEING:
            actions.extend(switching.reconcile(self.state, call.now_s))
            actions.extend(grants.moved(self.state))
        return actions

    def check_allowed(self, connection: int, method: str) -> None:
        """Pass where a connection's peer may call a method.

        Raises:
            AccessDenied: it may not.
        """
        client = self.state.clients[connection]
        if client.permission < METHODS.get(method, client.permission):
            settings = self.state.settings.daemon
            raise AccessDenied(
                f"uid {client.peer.uid} may only read; join the group {settings.group!r} "
                f"to call {method!r}"
            )

    def reconfigure(self, settings: Settings, now_s: float) -> list[Action]:
        """Go by other settings from now on; budgets follow at the next look."""
        old, self.state.settings = self.state.settings, settings
        tables = outside.reconfigured(self.state, old)
        enforced = settings.enforcement
        watchdog = self.state.watchdog
        watchdog.grace_s, watchdog.return_s = enforced.grace, enforced.return_deadline
        watchdog.unkillable_after_s = enforced.unkillable_after
        told: list[Action] = [
            Notify(client.id, "reloaded", {})
            for client in self.state.clients.values()
            if client.workers
        ]
        return self._record([*told, *tables, Event("reloaded")], now_s)

    def found(
        self,
        identity: Identity,
        comm: str,
        uid: int | None,
        page: PageFigures,
        process: ProcessReading,
        now_s: float,
    ) -> list[Action]:
        """A live process's account page from before a restart of the daemon has turned up."""
        actions = returning.found(self.state, identity, comm, uid, page, process, now_s)
        return self._record(actions, now_s)

    def running(
        self,
        outsider: Outsider,
        params: Mapping[str, Any],
        process: ProcessReading,
        now_s: float,
    ) -> list[Action]:
        """A program runs that is to be a worker, by the configuration or from before a restart.

        Raises:
            RequestRejected: it cannot be; nothing was changed.
        """
        actions = list(outside.take_over(self.state, params, outsider, process, now_s))
        self._search_s = now_s
        return self._record(actions, now_s)

    # ----------------------------------------------------------------- looks

    def observe(
        self,
        snapshot: Snapshot,
        now_s: float,
        accounts: Mapping[int, AccountFigures] | None = None,
    ) -> list[Action]:
        """One look at memory, in the order of the module's docstring.

        Args:
            snapshot: the machine and the processes.
            now_s: the moment.
            accounts: what the account pages say, by worker; one that is missing is unknown.
        """
        state = self.state
        if state.snapshot is not None:
            state.fill_rate = max(state.fill_rate, int(fastest(state.snapshot, snapshot)))
        room.take_pressure(state, snapshot)
        self._earlier, state.snapshot = state.snapshot, snapshot
        for key, member in state.members.items():
            member.figures = (accounts or {}).get(key)
        room.take_budgets(state, snapshot)  # 1
        books = list(state.books())
        for at, mine in enumerate(books):  # 2
            if not mine.releasing:
                continue
            left = still_there(mine, snapshot.processes.get(mine.identity))
            if left is not None:
                process = state.processes[mine.identity]
                state.ledger.settle(process.members, LeaseKind.BURST, left.bursts)
                state.ledger.settle(process.members, LeaseKind.LOAD, left.loads)
                books[at] = state.books_of(process)
        actions: list[Action] = []
        found = breaches(books, state.accounts(), snapshot)  # 3
        for breach in found:
            process = state.processes[breach.identity]
            names = enforcement.blamed(state, breach)
            booked = sum(map(state.ledger.booked_by, process.members))
            opened = state.watchdog.open(breach, names, process.comm, booked, now_s)
            if opened is not None:
                actions.extend(enforcement.carry_out(state, opened, now_s))
        for verdict in state.watchdog.judge(found, snapshot, now_s):
            actions.extend(enforcement.carry_out(state, verdict, now_s))
        membership.forget_left(state)
        actions.extend(outside.settle(state, now_s))
        actions.extend(pressure.observe(state, now_s))
        room.take_overdrawn(state, books)
        actions.extend(self._advance(now_s))  # 4, 5
        state.check()  # 6
        self._books = list(state.books()) if actions else books
        if snapshot.zones is not None:
            actions.extend(ladder.observe(state, snapshot.zones, now_s))  # 7
        actions.extend(migration.observe(state, snapshot, now_s))  # 8
        return self._record(actions, now_s)

    def limits(self) -> dict[Identity, int]:
        """What each judged process may hold, in bytes; an orphaned family nothing, for certain."""
        return {
            books.identity: limit
            for books in self.state.books()
            if (limit := books.limit if books.limit_released is None else books.limit_released)
        }

    def exited(self, identity: Identity, now_s: float) -> list[Action]:
        """The kernel says that a process has ended: its bytes are back, or its family has them."""
        process = self.state.processes.get(identity)
        if process is not None and process.members and process.family:
            self._fast_until_s = now_s + FAST_FOR_S
            lives_on = process.unit and not self.state.watchdog.killing(identity)
            follow = outside.succeeded if lives_on else kin.orphaned
            actions = list(follow(self.state, process, now_s))
        else:
            actions = list(self._gone(identity, now_s))
        actions.extend(self._served(now_s))
        return self._record(actions, now_s)

    def search_due(self, now_s: float) -> bool:
        """Whether families must be searched for before the next look at memory.

        Every second, since it costs a few milliseconds; and whenever something depends on it.
        """
        due = bool(self.state.processes) and now_s >= self._search_s
        return due or kin.urgent(self.state, now_s)

    def searched(
        self, families: Mapping[Identity, frozenset[Identity]], now_s: float
    ) -> list[Action]:
        """The families of the registered processes, as a search has found them."""
        self._search_s = now_s + SEARCH_EVERY_S
        actions = list(kin.found(self.state, families))
        for identity, process in list(self.state.processes.items()):
            if process.ended and not process.family:
                actions.extend(self._gone(identity, now_s))
        actions.extend(self._served(now_s))
        return self._record(actions, now_s)

    def kill_sent(self, identity: Identity, now_s: float) -> None:
        """SIGKILL has left: the moment from which the victim's exit is counted."""
        self._fast_until_s = now_s + FAST_FOR_S
        for case in self.state.watchdog.cases:
            if case.identity == identity and case.killed_s is not None:
                case.killed_s = now_s

    def advance(self, now_s: float) -> list[Action]:
        """Time has passed; ``deadlines.next_s`` says when this is due."""
        look = self.state.watchdog.next_look_s()
        if look is not None and look <= now_s:
            return [Look()]
        return self._record(self._advance(now_s), now_s)

    def pace(self, now_s: float) -> Pace:
        """When the next look at memory comes, and who is glanced at until then."""
        state = self.state
        assert state.snapshot is not None, "there is a look before there is a pace"
        cases = list(state.watchdog.cases)
        if any(case.killed_s is None and now_s - case.revoked_s < FAST_FOR_S for case in cases):
            returning = True  # its bytes are being taken: a matter of a moment
        else:
            returning = now_s < self._fast_until_s and (
                bool(cases) or any(state.ledger.holding(key).releasing for key in state.members)
            )
        state.pace = pace(
            self._books,
            self._earlier,
            state.snapshot,
            interval_s=state.settings.memory.interval,
            fill_rate=state.fill_rate,
            reserve=state.reserves.get(SYSTEM_POOL, 0),
            returning=returning,
        )
        return state.pace

    def status(self, now_s: float) -> dict[str, Any]:
        """The whole state as plain values."""
        return report.status(self.state, now_s)

    # ---------------------------------------------------------------- private

    def _gone(self, identity: Identity, now_s: float) -> Iterator[Action]:
        """A process has ended: everything it held is free."""
        process = self.state.processes.pop(identity, None)
        if process is None:
            return
        freed = 0
        names = self.state.names(process)
        case = self.state.watchdog.close(identity)
        yield from outside.unanswered(self.state, process)
        for key in process.members:
            freed += self.state.ledger.drop(key)
            membership.remove(self.state, key)
        if case is None:
            yield Event(
                "exited",
                "info",
                {"pid": identity.pid, "workers": ",".join(names), "freed_bytes": freed},
            )
        else:
            yield enforcement.stopped(self.state, case, max(freed, case.booked), now_s)
        yield Unwatch(identity)

    def _advance(self, now_s: float) -> Iterator[Action]:
        yield from deadlines.passed(self.state, now_s)
        yield from self._served(now_s)
        yield from switching.reconcile(self.state, now_s)
        yield from membership.forget_processes(self.state)

    def _served(self, now_s: float) -> Iterator[Action]:
        """Whoever can be served now is served."""
        yield from grants.pump(self.state, now_s)
        if self.state.mutex.holder is None and not self.state.recovering(now_s):
            waiter = self.state.inits.head()
            if waiter is not None:
                self.state.inits.remove(waiter)
                yield requests.lock_granted(self.state, waiter, now_s)
        yield from grants.moved(self.state)

    def _record(self, actions: Iterable[Action], now_s: float) -> list[Action]:
        """Number events, keep the last ones, and send them to who listens."""
        out: list[Action] = [*actions]
        # The guard must know a new limit before the worker hears of its grant.
        out[:0] = enforcement.limits(self.state)
        for action in list(out):
            if isinstance(action, Event):
                self.state.event_seq += 1
                entry = {
                    "seq": self.state.event_seq,
                    "name": action.name,
                    "level": action.level,
                    "unix_s": round(now_s + self.unix_offset_s, 6),
                    **action.fields,
                }
                self.state.events.append(entry)
                if action.name == "stopped":
                    stop = self.state.history.stopped(action.fields, entry["unix_s"])
                    out.append(RememberStop(stop))
                out.extend(
                    Notify(client.id, "event", entry)
                    for client in self.state.clients.values()
                    if client.listening
                )
        return out


_FREEING: Final = frozenset(
    {
        "unregister",
        "commit",
        "void",
        "release",
        "init_unlock",
        "forward_done",
        "set_quota",
        "resume",
    }
)
_QUEUEING: Final = frozenset({"reserve", "init_lock", "keep", "drain"})
