"""What must hold, judged from outside: from what was asked, answered and physically there.

Nothing here trusts a sum of the engine's.  Rules, by the name in ``Found``:

* ``capacity``: no grant beyond the books or beyond what is physically free at the last look;
* ``books``: leases are what was answered, end by a cause, and sum to what the pool has booked;
* ``oversold``: what a worker was told it may hold without asking is booked for it while it is
  loaded, and while it loads;
* ``double release``: a lease ends once;
* ``fenced write``: a word with a token of another time changes nothing;
* ``two holders``: one worker at a time has the load mutex;
* ``recovery``: nothing is granted while former workers may return;
* ``lost waiter``: whoever waits is answered by its bound;
* ``lost wake-up``: nobody waits for what is there for longer than from one look to the next;
* ``starved``: who waits is passed within the bounds in count and time, and no more;
* ``eviction``: never a pinned, loading or working victim, nor one too young, nor again for the
  same rival within its rest;
* ``innocent``: nobody is revoked or killed who holds what it may.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.packer import Use
from tests.simulation.steps import Found, Pending
from tests.simulation.world import World
from umad.core.audit import NOISE_BYTES, NOISE_RATIO, reserve_of
from umad.core.waiting import Waiter
from umad.errors import UmadError
from umad.values import SYSTEM_POOL, Identity, LeaseState, Snapshot

if TYPE_CHECKING:
    from tests.simulation.model import Model, Session

ANSWER_SLACK_S: Final = 0.25
SAMPLE_S: Final = 60.0
ROUNDING_S: Final = 1e-6  # a moment plus 30 s, less that moment, is not always 30 s


@dataclass(slots=True)
class Shadow:
    """A lease as its owner was told of it."""

    worker: int
    identity: Identity
    bytes: int
    load: bool
    until_s: float | None
    token: int
    released: bool = False
    stale: bool = False  # a word with a token of another time named it


class Judge:
    """See the module; one per world."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.judge = self
        self.use = Use(world)
        self.grants = self.evictions = self.kills = self.restarts = 0
        self.told_of: Counter[str] = Counter()  # events and refusals
        self.wait_max_s = 0.0
        self.recovering_until_s = 0.0
        self._leases: dict[int, Shadow] = {}
        self._ended: set[tuple[int, int]] = set()  # leases that are no more, and their tokens
        self._holder: tuple[int, int, float] | None = None  # connection, worker, until
        self._held: dict[Identity, int] = {}  # bytes at the last look
        self._tenants = self._room = 0
        self._budget = 0
        self._healthy = False
        self._names: dict[int, str] = {}
        self._quotas: dict[str, int] = {}  # by name, as told last
        self._ready_s: dict[str, float] = {}
        self._evicted: dict[tuple[str, str], float] = {}  # when, by victim and rival
        self._passed: Counter[int] = Counter()  # by the request that was passed
        self._overstayed: set[str] = set()  # whose last burst lease expired
        self._fitted: set[int] = set()  # requests that could have been granted at the last look
        world.after(SAMPLE_S, self._sample)

    # ------------------------------------------------------------ what happens

    def started(self, recovering_until_s: float) -> None:
        """A daemon that knows nothing."""
        self.recovering_until_s = recovering_until_s
        self.restarts += 1
        self._leases.clear()
        self._ended.clear()
        self._names.clear()
        self._quotas.clear()
        self._evicted.clear()
        self._passed.clear()
        self._fitted.clear()
        self._holder = None

    def demand(self, model: "Model", session: "Session") -> None:
        """A session has come."""
        self.use.sessions.append((model, session))

    def waits(self, key: tuple[int, int], pending: Pending) -> None:
        """A request is not answered at once."""
        left_s = pending.bound_s - self.world.now_s + ANSWER_SLACK_S
        self.world.after(left_s, self._overdue, key, pending)

    def _overdue(self, key: tuple[int, int], pending: Pending) -> None:
        if self.world.pending.get(key) is pending:
            raise Found(
                "lost waiter",
                f"{pending.task.program.name} asked {pending.ask.method} at "
                f"{pending.asked_s:.3f} and was to be answered by {pending.bound_s:.3f}",
            )

    def answered(
        self,
        connection: int,
        pending: Pending,
        result: dict[str, Any] | None,
        error: UmadError | None,
    ) -> None:
        """An answer is on its way to its task."""
        ask, now_s = pending.ask, self.world.now_s
        if error is not None:
            self.told_of["refused_" + error.code] += 1
            return
        assert result is not None
        if ask.refused:
            twice = self._leases.get(ask.params.get("lease", -1))
            ended = twice is not None and twice.released
            ended = ended or (ask.params.get("lease"), ask.params["token"]) in self._ended
            rule = "double release" if ended else "fenced write"
            raise Found(rule, f"{ask.method} {dict(ask.params)} was answered {result}")
        if "deadline_s" in result:
            result["until_s"] = now_s + result["deadline_s"]
        match ask.method:
            case "register":
                self._registered(connection, pending, result)
            case "reserve" | "admit":
                self.wait_max_s = max(self.wait_max_s, now_s - pending.asked_s)
                self._granted(pending, result)
                if ask.method == "reserve":
                    self._overtook(pending)
            case "commit":
                shadow = self._leases[ask.params["lease"]]
                shadow.bytes, shadow.until_s = result["bytes"], None
                self._ready_s[self._names[shadow.worker]] = now_s
                self._covered(shadow)
            case "set_quota":
                self._quota_set(ask.params["worker"], result["quota"])
            case "release" | "void":
                self._given_back(ask.params["lease"])
            case "init_lock":
                self._locked(connection, ask.params["worker"], result)
            case "init_unlock" | "unregister":
                self._unlocked(ask.params["worker"])

    def _given_back(self, lease: int) -> None:
        shadow = self._leases[lease]
        if shadow.released:
            raise Found("double release", f"lease {lease} ended twice")
        shadow.released = True

    def _registered(self, connection: int, pending: Pending, result: Mapping[str, Any]) -> None:
        program = pending.task.program
        params, leases = pending.ask.params, self.world.settings.leases
        name = params["model"]
        if result["worker"] not in self._names:
            self._quotas[name] = params["quota"]
        self._names[result["worker"]] = name
        loading = params.get("loading")
        if "held" not in params and loading is None:  # a new process: nothing is known of the old
            self._evicted = {key: at for key, at in self._evicted.items() if key[0] != name}
        if "init_token" in result:
            self._holds(connection, result["worker"], leases.init_timeout)
        if "lease" not in result or result["lease"] in self._leases:
            return
        owner, token = program.body.identity, result["token"]
        size, until_s = loading or params["quota"], self.world.now_s + leases.load_timeout
        shadow = Shadow(result["worker"], owner, size, True, until_s if loading else None, token)
        self._leases[result["lease"]] = shadow
        until_s = self.world.now_s + leases.burst_ttl
        bursts = zip(params.get("bursts", ()), result.get("bursts", ()), strict=True)
        for size, again in bursts:  # of a forward at work
            if again is not None:
                shadow = Shadow(result["worker"], owner, size, False, until_s, again["token"])
                self._leases[again["lease"]] = shadow

    def quota_of(self, model: "Model") -> int:
        """As people have set it; else what it registers with."""
        return self._quotas.get(model.name, model.quota)

    def _quota_set(self, worker: int, quota: int) -> None:
        """People have changed a quota: the booking of a loaded model has followed."""
        self._quotas[self._names[worker]] = quota
        for key, shadow in self._leases.items():
            if shadow.worker != worker or not shadow.load or shadow.released:
                continue
            if shadow.until_s is None:
                grows, shadow.bytes = quota > shadow.bytes, quota
                if grows:
                    self._fits_the_machine(f"with {quota} bytes of lease {key}")
            self._covered(shadow)

    def _covered(self, shadow: Shadow) -> None:
        name = self._names[shadow.worker]
        quota = self._quotas[name]
        if shadow.load and shadow.bytes < quota:
            raise Found("oversold", f"{name} may hold {quota}, booked for it are {shadow.bytes}")

    def _unlocked(self, worker: int) -> None:
        if self._holder is not None and self._holder[1] == worker:
            self._holder = None

    def _locked(self, connection: int, worker: int, result: Mapping[str, Any]) -> None:
        self._recovering("init_lock")
        self._holds(connection, worker, result["deadline_s"])

    def _holds(self, connection: int, worker: int, lasts_s: float) -> None:
        now_s = self.world.now_s
        if self._holder is not None and now_s < self._holder[2]:
            raise Found("two holders", f"{connection} got the mutex that {self._holder} has")
        self._holder = (connection, worker, now_s + lasts_s)

    def _granted(self, pending: Pending, result: Mapping[str, Any]) -> None:
        self.grants += 1
        self._recovering(pending.ask.method)
        lease, load = result["lease"], pending.ask.method == "reserve"
        if lease in self._leases and not self._leases[lease].released:
            raise Found("books", f"lease {lease} was given out twice")
        program = pending.task.program
        until_s = self.world.now_s + result["deadline_s"]
        worker = pending.ask.params["worker"]
        self._overstayed.discard(self._names[worker])
        owner, token = program.body.identity, result["token"]
        shadow = Shadow(worker, owner, result["bytes"], load, until_s, token)
        self._leases[lease] = shadow
        self._fits_the_machine(f"with lease {lease} of {shadow.bytes} bytes")
        if not load and self.world.engine.state.ledger.booked(SYSTEM_POOL) > self._budget:
            raise Found("capacity", "a burst was granted beyond the budget")
        self._covered(shadow)

    def _fits_the_machine(self, what: str) -> None:
        """Nothing is promised twice: by the books, and by what is physically there."""
        active: dict[Identity, int] = {}
        for shadow in self._leases.values():
            if not shadow.released:
                active[shadow.identity] = active.get(shadow.identity, 0) + shadow.bytes
        booked = sum(active.values())
        if booked > self._budget:
            raise Found("capacity", f"{booked} bytes are booked, the budget is {self._budget}")
        promised, slack = self._tenants, 0
        bodies = self.world.machine.bodies
        for identity in self._held.keys() | active.keys():
            mine = active.get(identity, 0)
            held = self._held.get(identity, 0)
            base = bodies[identity].baseline if identity in bodies else 0
            promised += max(held, base + mine)
            slack += max(NOISE_BYTES, int(NOISE_RATIO * max(held, mine)))
        if promised > self._room + slack:
            raise Found(
                "capacity",
                f"{what} {promised} are promised or held, {self._room} there",
            )

    def _overtook(self, pending: Pending) -> None:
        """Of those who have waited longer, some were passed."""
        leases, now_s = self.world.settings.leases, self.world.now_s
        mine = self._priority(pending)
        for (_, request), other in self.world.pending.items():
            waits = other.ask.method == "reserve" and other.task.program.alive
            waits = waits and other.asked_s < pending.asked_s
            if not waits or self._priority(other) < mine:
                continue
            self._passed[request] += 1
            waited_s = now_s - other.asked_s
            if self._passed[request] > leases.overtake_max or waited_s > leases.overtake_s:
                name = self._names[other.ask.params["worker"]]
                raise Found(
                    "starved", f"{name} waits {waited_s:.1f} s, passed {self._passed[request]} x"
                )

    def _priority(self, pending: Pending) -> int:
        name = self._names[pending.ask.params["worker"]]
        return next(one.priority for one in pending.task.program.models if one.name == name)

    def _recovering(self, method: str) -> None:
        if self.world.now_s < self.recovering_until_s:
            raise Found("recovery", f"{method} was granted while former workers may return")

    def told(self, params: Mapping[str, Any]) -> None:
        """``forward_done`` ends the lease it names, unless that is another one of that number."""
        shadow = self._leases.get(params.get("lease", -1))
        if shadow is not None:
            stale = shadow.token != params["token"]
            shadow.released, shadow.stale = not stale or shadow.released, stale

    def disconnected(self, connection: int) -> None:
        """The daemon sees a connection end."""
        if self._holder is not None and self._holder[0] == connection:
            self._holder = None

    def exited(self, identity: Identity) -> None:
        """A process is gone: so are its leases."""
        for shadow in self._leases.values():
            if shadow.identity == identity:
                shadow.released = True
        program = next((one for one in self.world.programs if one.body.identity == identity), None)
        if program is not None and self._holder is not None:
            connection = self._holder[0]
            if self.world.of_connection.get(connection) in (program, None):
                self._holder = None

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """The daemon says why leases end that nobody gave back."""
        self.told_of[name] += 1
        if name == "lease_expired":
            shadow = self._leases[fields["lease"]]
            if shadow.until_s is None or self.world.now_s < shadow.until_s - 0.002:
                raise Found("books", f"lease {fields['lease']} expired before its time")
            shadow.released = True
            if not shadow.load:
                self._overstayed.add(fields["worker"])
        elif name == "left":
            worker = {key for key, known in self._names.items() if known == fields["worker"]}
            for shadow in self._leases.values():
                if shadow.worker in worker and shadow.identity.pid == fields["pid"]:
                    shadow.released = True

    def killed(self, identity: Identity, reason: str) -> None:
        """SIGKILL leaves."""
        self.kills += 1
        self._blameless(identity, f"killed for {reason}")

    def notified(self, connection: int, method: str, params: Mapping[str, Any]) -> None:
        """A notification leaves."""
        if method == "revoke":
            program = self.world.of_connection.get(connection)
            if program is not None:
                self._blameless(program.body.identity, f"revoked: {params['reason']}")
        elif method == "evict":
            self._evict(params)

    def _blameless(self, identity: Identity, what: str) -> None:
        program = next((one for one in self.world.programs if one.body.identity == identity), None)
        if program is None or not program.alive:
            return  # an orphan
        names = {model.name: model for model in program.models}
        quotas = {name: self.quota_of(model) for name, model in names.items()}
        booked: dict[str, int] = {}
        for shadow in self._leases.values():
            name = self._names.get(shadow.worker, "")
            if name in names and not shadow.released:
                booked[name] = booked.get(name, 0) + shadow.bytes
        # A burst is its owner's until its bytes are back, restarts of the daemon or not.
        may = {
            name: max(quotas[name], booked.get(name, 0), quotas[name] + model.allowed)
            if name not in self._overstayed
            else max(quotas[name], booked.get(name, 0))
            for name, model in names.items()
        }
        allowed = sum(may.values())
        held = self._held.get(identity, 0) - program.body.baseline
        worst = max(model.block.at(self.world.now_s) - may[name] for name, model in names.items())
        if held <= allowed and worst <= 0:
            raise Found("innocent", f"{program.name} holds {held} of {allowed} and was {what}")

    # -------------------------------------------------------------- evictions

    def _evict(self, params: Mapping[str, Any]) -> None:
        self.evictions += 1
        world, now_s = self.world, self.world.now_s
        name, rival = self._names[params["worker"]], str(params.get("for_worker", ""))
        model = next(
            one for program in world.programs for one in program.models if one.name == name
        )
        leases = world.settings.leases
        if model.pin:
            raise Found("eviction", f"{name} is pinned")
        if not rival:
            return  # pressure, or a person
        age_s = now_s - self._ready_s.get(name, -1e9)
        if age_s < leases.residence_min - ROUNDING_S:
            raise Found("eviction", f"{name} was loaded {age_s:.1f} s ago")
        bursts = (one for one in self._leases.values() if not (one.load or one.released))
        if any(one.worker == params["worker"] for one in bursts):
            raise Found("eviction", f"{name} holds a burst")
        ago_s = now_s - self._evicted.get((name, rival), -1e9)
        if ago_s < leases.rival_rest - ROUNDING_S:
            raise Found("eviction", f"{name} was to go for {rival} {ago_s:.1f} s ago already")
        self._evicted[name, rival] = now_s

    # ------------------------------------------------------------------ looks

    def looked(self, snapshot: Snapshot) -> None:
        """What is physically there at a look."""
        machine, now_s = self.world.machine, self.world.now_s
        self._tenants = machine.tenants.at(now_s)
        self._held = {who: body.at(now_s) for who, body in machine.bodies.items()}
        reserve = reserve_of(machine.capacity, SYSTEM_POOL, None)
        self._room = machine.capacity - reserve
        self._budget = max(0, self._room)
        readings = [snapshot.pools[SYSTEM_POOL].safe]
        readings += [reading.bytes for reading in snapshot.processes.values()]
        self._healthy = all(reading.value is not None for reading in readings)

    def unsettled(self) -> bool:
        """Whether bytes are on their way back, or who waits could be served."""
        state = self.world.engine.state
        booked = (state.ledger.holding(key).releasing for key in state.members)
        return bool(self._fitted) or state.relief.closed_s is not None or any(booked)

    def after_look(self) -> None:
        """The engine has done all it could with a look."""
        state = self.world.engine.state
        booked = 0
        live = set()
        for lease in state.ledger.leases.values():
            booked += lease.bytes
            if lease.state is LeaseState.RELEASING:
                continue
            live.add(lease.id)
            shadow = self._leases.get(lease.id)
            if shadow is None or shadow.released or shadow.bytes != lease.bytes:
                raise Found("books", f"{lease} is known as {shadow}")
        if state.ledger.pools and booked != state.ledger.booked(SYSTEM_POOL):
            raise Found(
                "books", f"leases sum to {booked}, {state.ledger.booked(SYSTEM_POOL)} are booked"
            )
        for key, shadow in list(self._leases.items()):
            if shadow.released:
                del self._leases[key]
                self._ended.add((key, shadow.token))
            elif key not in live:
                rule = "fenced write" if shadow.stale else "books"
                raise Found(rule, f"lease {key}, {shadow}, is gone without a cause")
        self._progress()

    def _progress(self) -> None:
        """Nobody waits for what is there."""
        world = self.world
        state = world.engine.state
        if world.now_s < self.recovering_until_s or not self._healthy:
            return
        first = state.loads.head()
        overtake_s = world.settings.leases.overtake_s
        kept = first is not None and world.now_s - first.since_s >= overtake_s
        heads = [first] if kept else [first, state.bursts.head()]
        fitting = {head.request: head for head in heads if head is not None and self._fits(head)}
        for request in fitting.keys() & self._fitted:
            raise Found("lost wake-up", f"{fitting[request]} fits and waits")
        self._fitted = set(fitting)
        if fitting:
            world.disturb()
        if state.mutex.holder is None and len(state.inits):
            raise Found("lost wake-up", f"{state.inits.head()} waits for a free mutex")

    def _fits(self, waiter: Waiter) -> bool:
        state = self.world.engine.state
        if state.unclaimed() or state.relief.closed_s is not None:
            return False
        free = self._budget - state.ledger.booked(SYSTEM_POOL)
        unused = 0
        for books in state.books():
            body = self.world.machine.bodies.get(books.identity)
            held = 0 if body is None else self._held[books.identity] - books.baseline
            unused += max(0, books.active + books.releasing - held)
        physical = self._room - self._tenants - sum(self._held.values()) - unused
        return 0 < waiter.bytes <= min(free, physical)

    def _sample(self) -> None:
        self.world.after(SAMPLE_S, self._sample)
        self.use.sample(self._room)
