"""Discrete events around one real engine: the clock, the shell's part, and tasks that take time.

What the daemon's loop does, this does: looks on a grid of 200 ms, deadlines as the engine names
them, actions carried out.  Looks at which nothing can have changed are left out (``dense`` takes
all): after an event comes the next one; while bytes return or somebody is being stopped they
follow at 200 ms and then at ever longer distances; while somebody waits, every few seconds.

A task is a generator.  It yields a number of seconds to sleep, an ``Ask`` to put to the daemon
(the answer comes back, or a refusal is raised), or ``PARK`` to sleep until somebody wakes it.
"""

import heapq
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.machine import Body, Machine
from tests.simulation.steps import Ask, Found, Lost, Pending, Scenario, Steps, Task
from umad.config import Settings, parse
from umad.core import deadlines, kin
from umad.core.access import Access
from umad.core.actions import (
    Action,
    CloseAccount,
    Event,
    Kill,
    Look,
    Notify,
    OpenAccount,
    Refuse,
    Reply,
    SetLimit,
)
from umad.core.engine import Engine
from umad.errors import InvariantBroken, UmadError
from umad.values import AccountFigures, Identity, PageFigures, Peer
from umad.wire.messages import check_params

if TYPE_CHECKING:
    from tests.simulation.judge import Judge
    from tests.simulation.program import Program

LOOK_S: Final = 0.2
LOOK_MAX_S: Final = 6.4
LOOK_WAITING_S: Final = 3.2
LOOK_IDLE_S: Final = 60.0
TRACE_KEPT: Final = 60
SPINS_MAX: Final = 100

CONFIG: Final = """
[leases]
init_timeout = "60s"
"""


class World:
    """See the module."""

    def __init__(self, scenario: Scenario, engines: Callable[..., Engine] = Engine) -> None:
        self.scenario = scenario
        self.random = Random(f"{scenario.seed}/world")
        self.now_s = 0.0
        self.machine = Machine()
        self.settings: Settings = parse(CONFIG)
        self.programs: list[Program] = []
        self.of_connection: dict[int, Program] = {}
        self.pending: dict[tuple[int, int], Pending] = {}
        self.trace: deque[str] = deque(maxlen=TRACE_KEPT)
        self.steps = self.looks = self.calls = 0
        self.up = False
        self.engine: Engine
        self.judge: Judge
        self.limits: dict[tuple[Identity, int], int] = {}  # account pages, as the guard sees them
        self.fenced: set[tuple[Identity, int]] = set()
        self._engines = engines
        self.generation = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = self._request = self._connection = self._pid = 0
        self._gap_s = LOOK_S
        self._next_look_s = 0.0
        self._armed_s: float | None = None
        self._spin = (0.0, 0)

    # ------------------------------------------------------------------- time

    def after(self, seconds: float, deed: Callable[..., None], *args: Any) -> None:
        """Do it later."""
        self._order += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._order, deed, args))

    def run(self) -> None:
        """Let the scenario's time pass.

        Raises:
            Found: a rule was broken.
        """
        end_s = self.scenario.hours * 3600
        events = self._events
        try:
            while events and events[0][0] <= end_s:
                self.now_s, _, deed, args = heapq.heappop(events)
                self.steps += 1
                deed(*args)
        except InvariantBroken as error:
            raise Found("invariant", str(error)) from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
            raise Found("crash", "".join(traceback.format_exception(error)[-3:])) from error
        self.now_s = end_s

    def note(self, *words: object) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.now_s:.3f} " + " ".join(map(str, words)))

    # ------------------------------------------------------------ the daemon

    def start(self) -> None:
        """The daemon starts, or starts again: nothing of what it knew is left."""
        self.generation += 1
        until_s = self.now_s + (self.settings.leases.recovery if self.generation > 1 else 0.0)
        self.engine = self._engines(
            self.settings,
            Access(990, 50, 60),
            generation=self.generation,
            recovering_until_s=until_s,
        )
        self.up = True
        self._armed_s = None
        self.note("the daemon starts, generation", self.generation)
        self.judge.started(until_s)
        pages: dict[Identity, dict[int, int]] = {}
        for (identity, slot), limit in self.limits.items():
            pages.setdefault(identity, {})[slot] = limit
        self.look()
        for identity, slots in pages.items():
            body = self.machine.bodies.get(identity)
            if body is None or not body.own:
                continue
            closed = frozenset(slot for slot in slots if (identity, slot) in self.fenced)
            program = next(one for one in self.programs if one.body is body)
            used = sum(program.used(slot) or 0 for slot in slots if slot not in closed)
            limits = {slot: limit for slot, limit in slots.items() if slot not in closed}
            page = PageFigures(limits, closed, used)
            reading = self.machine.reading(identity, self.now_s)
            self._do(self.engine.found(identity, "sim", 0, page, reading, self.now_s))

    def stop(self, gap_s: float) -> None:
        """kill -9 of the daemon; systemd starts it again after ``gap_s``."""
        self.note("the daemon is killed")
        self.up = False
        for connection in list(self.of_connection):
            self._lose(connection)
        self.after(gap_s, self.start)

    def look(self) -> None:
        """One look at memory, as loop.py takes it."""
        if not self.up:
            return
        engine, now_s = self.engine, self.now_s
        self.looks += 1
        if engine.search_due(now_s):
            self.search()
        snapshot = self.machine.snapshot(engine.state.processes, now_s)
        accounts: dict[int, AccountFigures] = {}
        for program in self.programs:
            program.count(accounts)
        actions = engine.observe(snapshot, now_s, accounts)
        self.judge.looked(snapshot)
        self._do(actions)
        self._arm()
        self.judge.after_look()

    def search(self) -> None:
        """Find the families."""
        families = self.machine.families(kin.known(self.engine.state))
        self._do(self.engine.searched(families, self.now_s))

    def disturb(self) -> None:
        """Something happened: looks come closely again."""
        self._gap_s = LOOK_S
        soon_s = (self.now_s // LOOK_S + 1) * LOOK_S
        if soon_s < self._next_look_s or self._next_look_s <= self.now_s:
            self._next_look_s = soon_s
            self.after(soon_s - self.now_s, self._tick)

    def _tick(self) -> None:
        if abs(self.now_s - self._next_look_s) > LOOK_S / 2:
            return  # another one came before
        self.look()
        gap_s = LOOK_S if self.scenario.dense else self._until_next_s()
        self._next_look_s = self.now_s + gap_s
        self.after(gap_s, self._tick)

    def _until_next_s(self) -> float:
        state = self.engine.state
        if not self.up or any(state.watchdog.cases) or self.judge.unsettled():
            gap_s, self._gap_s = self._gap_s, min(self._gap_s * 2, LOOK_MAX_S)
            return gap_s
        return LOOK_WAITING_S if any(map(len, state.queues)) else LOOK_IDLE_S

    def _arm(self) -> None:
        due_s = deadlines.next_s(self.engine.state)
        if due_s is None or (self._armed_s is not None and self._armed_s <= due_s):
            return
        self._armed_s = due_s
        self.after(max(0.0, due_s - self.now_s), self._deadline, due_s)

    def _deadline(self, due_s: float) -> None:
        if not self.up or self._armed_s != due_s:
            return
        self._armed_s = None
        at_s, count = self._spin
        self._spin = (self.now_s, count + 1 if at_s == self.now_s else 0)
        if self._spin[1] > SPINS_MAX:
            raise Found("spin", f"the deadline {due_s} is always due")
        self.disturb()
        self._do(self.engine.advance(self.now_s))
        self._arm()

    # ------------------------------------------------------- what clients do

    def connect(self, program: "Program") -> int | None:
        """A new connection; None where nobody listens."""
        if not self.up:
            return None
        self._connection += 1
        peer = Peer(program.body.identity, 0, 0, frozenset(), program.name)
        self.of_connection[self._connection] = program
        self._do(self.engine.connected(self._connection, peer))
        return self._connection

    def hang_up(self, connection: int) -> None:
        """The connection ends; the daemon sees it."""
        if connection in self.of_connection:
            self._lose(connection)
            self.judge.disconnected(connection)
            self.disturb()
            self._do(self.engine.disconnected(connection, self.now_s))
            self._arm()

    def request(self, task: Task, ask: Ask) -> None:
        """Put a question to the daemon; the task goes on with the answer."""
        program = task.program
        connection = program.connection
        if connection is None:
            self.after(0.0, self.resume, task, task.token, None, Lost())
            return
        self._request += 1
        self.calls += 1
        key = (connection, self._request)
        bound_s = self.now_s + min(
            float(ask.params.get("wait_s", 0.0)), self.settings.leases.wait_max
        )
        self.pending[key] = Pending(task, task.token, ask, self.now_s, bound_s)
        identity = program.body.identity
        reading = self.machine.reading(identity, self.now_s) if ask.method == "register" else None
        self.note(program.name, ask.method, dict(ask.params))
        self.disturb()
        params = check_params(ask.method, ask.params)
        actions = self.engine.request(*key, ask.method, params, self.now_s, reading)
        self._do(actions)
        if key in self.pending:
            self._arm()
            self.judge.waits(key, self.pending[key])

    def tell(self, program: "Program", method: str, **params: Any) -> None:
        """Send a notification."""
        if program.connection is None:
            return
        self.note(program.name, method, params)
        self.calls += 1
        self.disturb()
        checked = check_params(method, params)
        if method == "forward_done":
            self.judge.told(params)
        self._do(self.engine.notification(program.connection, method, checked, self.now_s))

    def new_identity(self) -> Identity:
        """A process that was never there before."""
        self._pid += 1
        return Identity(1000 + self._pid, 100 + self._pid)

    def ended(self, identity: Identity) -> None:
        """The kernel has taken a process down; pidfd and search tell the daemon."""
        self.disturb()
        self.limits = {key: limit for key, limit in self.limits.items() if key[0] != identity}
        if not self.up:
            return
        self.note("process", identity.pid, "has ended")
        if identity in self.engine.state.processes:
            self.search()
        self.judge.exited(identity)
        self._do(self.engine.exited(identity, self.now_s))
        self._arm()

    # ---------------------------------------------------------------- tasks

    def spawn(self, program: "Program", steps: Steps) -> Task:
        """Begin a task."""
        task = Task(program, steps)
        self.after(0.0, self.resume, task, task.token)
        return task

    def wake(self, task: Task) -> None:
        """End a task's sleep, if it sleeps."""
        if task.parked:
            task.parked = False
            self.after(0.0, self.resume, task, task.token)

    def resume(
        self, task: Task, token: int, value: Any = None, error: Exception | None = None
    ) -> None:
        """Go on with a task after what it waited for."""
        program = task.program
        if task.token != token or task.body is not program.body or not program.alive:
            return
        if program.stopped_until_s > self.now_s:
            wait_s = program.stopped_until_s - self.now_s
            self.after(wait_s, self.resume, task, token, value, error)
            return
        task.token += 1
        task.parked = False
        try:
            op = task.steps.send(value) if error is None else task.steps.throw(error)
        except StopIteration:
            return
        if op is None:
            task.parked = True
        elif isinstance(op, Ask):
            self.request(task, op)
        else:
            task.parked = op < 0  # a sleep that may be ended before
            self.after(abs(op), self.resume, task, task.token)

    # --------------------------------------------------------------- actions

    def _do(self, actions: Iterable[Action]) -> None:
        look = False
        for action in actions:
            match action:
                case Reply(connection, request, result):
                    self._answered((connection, request), dict(result), None)
                case Refuse(connection, request, error):
                    self._answered((connection, request), None, error)
                case Notify(connection, method, params):
                    self.note("->", connection, method, dict(params))
                    self.judge.notified(connection, method, params)
                    if (program := self.of_connection.get(connection)) is not None:
                        program.notified(method, params)
                case Kill(identity, reason):
                    self.note("SIGKILL", identity.pid, reason)
                    self.judge.killed(identity, reason)
                    self._kill(identity)
                case Look():
                    look = True  # once all answers are known: the judge holds the books to them
                case OpenAccount() | SetLimit() | CloseAccount():
                    self._do_on_page(action)
                case Event(name, _, fields):
                    self.note("event", name, dict(fields))
                    self.judge.event(name, fields)
        if look:
            self.look()

    def _do_on_page(self, action: OpenAccount | SetLimit | CloseAccount) -> None:
        key = action.identity, action.account
        match action:
            case CloseAccount(identity, slot):
                self.fenced.add(key)
                self._program(identity).fence(slot)
            case OpenAccount(_, _, limit, again):
                self.fenced.discard(key)
                if not again:
                    self.limits[key] = limit
            case SetLimit(_, _, limit):
                self.limits[key] = limit

    def _answered(
        self, key: tuple[int, int], result: dict[str, Any] | None, error: UmadError | None
    ) -> None:
        pending = self.pending.pop(key, None)
        if pending is None:
            raise Found("answered twice", f"request {key} has its answer already")
        program = pending.task.program
        self.note("->", program.name, pending.ask.method, result or repr(error))
        self.judge.answered(key[0], pending, result, error)
        self.after(0.0, self.resume, pending.task, pending.token, result, error)

    def _lose(self, connection: int) -> None:
        program = self.of_connection.pop(connection)
        program.connection = None
        for key in [key for key in self.pending if key[0] == connection]:
            pending = self.pending.pop(key)
            self.after(0.0, self.resume, pending.task, pending.token, None, Lost())
        program.lost()

    def _kill(self, identity: Identity) -> None:
        self.engine.kill_sent(identity, self.now_s)
        delay_s = self.random.uniform(0.02, 0.3)
        if self.random.random() < 0.02:
            delay_s += self.random.uniform(5, 20)  # state D
        for body in self.machine.bodies.values():
            if identity in body.family:
                self.after(delay_s, self.child_ends, body, identity)
                return
        program = self._program(identity)
        program.body.killed = True
        self.after(delay_s, program.die, program.body)

    def child_ends(self, body: Body, child: Identity) -> None:
        """One of a family ends; where the process is gone already, the last one takes the rest."""
        if body.family.pop(child, None) is None:
            return
        self.disturb()
        if not body.own and not body.family:
            self.machine.bodies.pop(body.identity, None)
        if self.up:
            self.search()

    def _program(self, identity: Identity) -> "Program":
        return next(one for one in self.programs if one.body.identity == identity)
