"""Models that use the daemon as umad-serve's do, each a task of its own.

One waits for sessions, books its peak, waits for the load mutex, loads, commits, serves (with
bursts), and unloads when it is asked to go or nobody has wanted it for a while.  Some lie: they
keep what they gave back, hold more than they booked, hear nothing, say things twice, or come back
with words of another time.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.machine import Bytes
from tests.simulation.steps import PARK, Ask, Lost, Steps, Task
from umad.errors import UmadError
from umad.units import GIB, MIB

if TYPE_CHECKING:
    from tests.simulation.program import Program

FILL: Final = 3 * GIB  # bytes a second that a load reads
NEVER_S: Final = 1e7
CALM_S: Final = 1.0  # the first sessions come after this


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody's work: ``forwards`` of ``forward_s`` each, some with a burst of ``burst`` bytes."""

    at_s: float
    patience_s: float
    forwards: int
    forward_s: float
    burst: int


def anyway(method: str, params: Mapping[str, Any], *, refused: bool = False) -> Steps:
    """Say something, whatever comes of it."""
    with suppress(Lost, UmadError):
        yield Ask(method, dict(params), refused)


class Model:
    """One worker of a program."""

    def __init__(self, program: "Program", name: str, random: Random) -> None:
        world = program.world
        self.program, self.world, self.name, self.random = program, world, name, random
        self.quota = int(min(72, max(1.5, random.lognormvariate(2.6, 0.9))) * GIB)
        self.peak = int(self.quota * random.choice((1.0, 1.0, 1.05, 1.2)))
        self.size = int(self.quota * random.uniform(0.9, 1.0)) - 64 * MIB
        self.priority = random.choice((0, 0, 0, 1, 5, -5))
        self.pin = random.random() < 0.04 and self.quota < 8 * GIB
        self.idle_s = random.choice((NEVER_S, NEVER_S, random.uniform(60, 600)))
        self.every_s = random.uniform(250, 1000) / world.scenario.load
        self.sessions: deque[Session] = deque()
        self.served = self.left = 0  # sessions
        self.block = Bytes()
        self.reset()
        world.after(CALM_S + random.expovariate(1 / self.every_s), self.arrive)

    def reset(self) -> None:
        """As in a fresh process."""
        self.worker: int | None = None
        self.generation = 0  # of the daemon that knows it
        self.slot: int | None = None
        self.lease: dict[str, Any] = {}  # lease and token of the load
        self.lock: dict[str, Any] = {}  # token of the load mutex, and until when
        self.stale: list[dict[str, Any]] = []  # leases of another time
        self.owed: tuple[int, dict[str, Any]] = (0, {})  # to be given back, by a generation
        self.state = "cold"
        self.draining = self.revoked = self.kept = False
        self.burst = self._burst = 0  # of the forward at work, and of the one before
        self.burst_lease: dict[str, Any] = {}
        self._back_s = 0.0  # when the latter's bytes are gone
        self.block = Bytes()
        self.task: Task | None = None

    @property
    def lent(self) -> int:
        """Bytes of a burst that it has not given back by word, though they may be back."""
        return self._burst if self.burst or self.burst_lease else 0

    # -------------------------------------------------------------- the demand

    def arrive(self) -> None:
        """A session comes, and the next one is on its way."""
        draw = self.random
        burst = draw.random() < 0.4
        session = Session(
            self.world.now_s,
            draw.uniform(30, 290),
            draw.randint(2, 5),
            draw.uniform(5, 90),
            int(draw.uniform(0.02, 0.2) * self.quota) if burst else 0,
        )
        self.world.after(draw.expovariate(1 / self.every_s), self.arrive)
        self.world.judge.demand(self, session)
        self.sessions.append(session)
        if not self.program.alive or self.task is None:
            return
        self._keep()
        self.world.wake(self.task)

    def _keep(self) -> None:
        """Somebody wants a model that was asked to go: the daemon may choose another."""
        if self.draining and self.wanted and not self.kept and self.worker is not None:
            self.kept = True
            self.world.tell(self.program, "keep", worker=self.worker)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it or is served by it."""
        return bool(self.sessions) or self.state == "serving"

    @property
    def allowed(self) -> int:
        """Bytes beyond the quota that were granted, and may not be back yet."""
        return self._burst if self.world.now_s < self._back_s else self.burst

    def _next(self) -> Session | None:
        """The next session whose client has not left."""
        while self.sessions:
            if self.sessions[0].at_s + self.sessions[0].patience_s > self.world.now_s:
                return self.sessions[0]
            self.sessions.popleft()
            self.left += 1
        return None

    # --------------------------------------------------------------- its life

    def main(self) -> Steps:
        """The worker's thread."""
        while True:
            session = self._next()
            if self.revoked:
                yield from self._unload()
                continue
            if session is None or self.worker is None:
                yield PARK
                continue
            epoch = self.program.epoch
            try:
                yield from self._load(session)
            except (Lost, UmadError) as error:
                yield from self._give_up(epoch, error)
                continue
            yield from self._serve()
            yield from self._unload()

    def _load(self, session: Session) -> Steps:
        wait_s = max(0.0, session.at_s + session.patience_s - self.world.now_s)
        self.state = "waiting"
        peak = {"bytes": self.peak}  # as it knows it; people may have set another quota
        answer = yield Ask("reserve", {"worker": self.worker, "wait_s": round(wait_s, 3), **peak})
        self.lease = {"lease": answer["lease"], "token": answer["token"]}
        self.state = "loading"
        self.lock = yield Ask("init_lock", {"worker": self.worker, "wait_s": 120.0})
        self.block.move(self.peak, self.world.now_s, self.peak / FILL)
        yield self.peak / FILL
        self.block.move(self.size, self.world.now_s, 0.1)
        yield 0.15
        self._check()
        yield Ask("commit", {**self.lease, "measured": self.size})
        self.state = "ready"
        if self.lock:  # after a cut somebody else may have it
            yield from self._unlock(self.lock)
        self._lie()

    def _unlock(self, lock: Mapping[str, Any]) -> Steps:
        late = self.world.now_s > lock["until_s"]
        unlock = {"worker": self.worker, "token": lock["token"]}
        try:
            yield Ask("init_unlock", unlock, refused=late)
        except (Lost, UmadError):
            if not late and self.program.connection is not None and not self.revoked:
                raise

    def _check(self) -> None:
        if self.revoked or self.worker is None or not self.lease:
            raise Lost

    def _give_up(self, epoch: int, error: Exception) -> Steps:
        """The load failed: what it took goes back, and it is tried again after a while."""
        self.state = "unloading"
        self.block.move(0, self.world.now_s, 0.2)
        yield 0.25
        if not self.revoked:
            self.owed = (self.generation, self.lease)
            yield from self.pay()
        self.lease = {}
        self.state = "cold"
        wait_s = error.retry_after_s if isinstance(error, UmadError) else None
        if epoch == self.program.epoch:
            yield max(0.2, wait_s or 1.0) * self.random.uniform(0.9, 1.5)

    def pay(self) -> Steps:
        """Give back the lease of a load that failed, as soon as there is a connection."""
        generation, lease = self.owed
        if self.worker is None:
            return
        self.owed = (0, {})
        if lease and generation == self.generation:
            yield from anyway("void", lease)

    def _serve(self) -> Steps:
        while not (self.draining or self.revoked):
            session = self._next()
            if session is None:
                idle_since_s = self.world.now_s
                yield -self.idle_s
                if self.world.now_s - idle_since_s >= self.idle_s - 0.001 and not self.sessions:
                    return
                continue
            self.sessions.popleft()
            self.served += 1
            self.state = "serving"
            for number in range(session.forwards):
                if self.revoked:
                    break
                if self.draining:  # what is at work is done; the rest is served elsewhere in time
                    self.sessions.appendleft(replace(session, forwards=session.forwards - number))
                    break
                yield from self._forward(session, number)
            self.state = "ready"

    def _forward(self, session: Session, number: int) -> Steps:
        self.burst_lease = {}
        if session.burst and number % 2 == 0 and self.worker is not None:
            try:
                answer = yield Ask(
                    "admit", {"worker": self.worker, "bytes": session.burst, "wait_s": 10.0}
                )
            except (Lost, UmadError):
                return  # 503 to that one
            self.burst_lease = {"lease": answer["lease"], "token": answer["token"]}
            self.burst = self._burst = session.burst
            self.block.move(self.block.goal + session.burst, self.world.now_s, 0.5)
        worker = self.worker
        yield session.forward_s
        if self.burst and not self.revoked:
            self.cut_short(0.1)
            if self.program.guarded or self.random.random() < 0.5:
                yield 0.12  # without a guard, bytes come back after the word
        if self.worker is None or (self.worker != worker and not self.burst_lease):
            return
        self.world.tell(
            self.program,
            "forward_done",
            worker=self.worker,
            **self.burst_lease,
            predicted=session.burst,
            peak=session.burst,
            tokens=512,
            batch=1,
            seconds=session.forward_s,
        )
        self.burst_lease = {}

    def cut_short(self, over_s: float = 0.005) -> None:
        """A forward's burst goes back."""
        if self.burst:
            self.block.move(max(0, self.block.goal - self.burst), self.world.now_s, over_s)
            self._back_s, self.burst = self.block.until_s, 0

    def _unload(self) -> Steps:
        liar = self.program.liar
        self.state = "unloading"
        self.draining = self.kept = False
        self.burst = 0
        over_s = self.random.uniform(0.02, 0.6)
        keeps = liar == "keeps" and self.random.random() < 0.5 and not self.revoked
        if keeps:
            over_s += self.random.uniform(5, 60)
        self.block.move(0, self.world.now_s, over_s)
        if not keeps and self.random.random() < 0.5:
            yield over_s
        lease, self.lease = self.lease, {}
        if lease and self.worker is not None and not self.revoked:
            yield from anyway("release", lease)
            if self.random.random() < 0.05:
                yield from anyway("release", lease, refused=True)
        if self.world.now_s < self.block.until_s:
            yield self.block.until_s - self.world.now_s
        if self.revoked:
            yield from self._start_anew()
        self.state = "cold"

    def _start_anew(self) -> Steps:
        """A fenced worker's thread has unwound: its place is free, and it registers afresh."""
        worker, self.worker = self.worker, None
        self.slot = None
        if worker is not None:
            yield from anyway("unregister", {"worker": worker})
        self.revoked = False
        self.program.register_again(self)

    def _lie(self) -> None:
        if self.program.liar == "greedy" and self.random.random() < 0.2:
            over = int(self.quota * self.random.uniform(0.05, 0.3))
            self.block.move(self.quota + over, self.world.now_s, self.random.uniform(0.5, 20))

    # --------------------------------------------------- what the daemon says

    def notified(self, method: str) -> None:
        """A word about this worker."""
        if method == "evict" and self.state in ("ready", "serving"):
            if self.program.liar == "deaf":
                return
            self.draining = True
            self._keep()
        elif method == "evict_cancelled":
            self.draining = self.kept = False
        elif method == "load" and self.state == "cold" and not self.sessions:
            now_s = self.world.now_s
            self.sessions.append(Session(now_s, 60.0, 1, 1.0, 0))
        elif method == "revoke":
            if self.program.liar == "deaf" or self.slot is None:
                return
            self.revoked = True
        if self.task is not None:
            self.world.wake(self.task)
