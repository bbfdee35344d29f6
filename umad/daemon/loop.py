"""The one loop that owns all state: messages in, looks at memory, actions out.

Everything runs in one thread, so the engine needs no lock.  systemd is told that the daemon
lives only after a finished tick, so that a hung loop is noticed and restarted.
"""

import asyncio
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from umad import __version__
from umad.config import Settings
from umad.core import kin
from umad.core.access import Access
from umad.core.actions import (
    Action,
    CloseAccount,
    Compact,
    Event,
    Kill,
    Look,
    Notify,
    OpenAccount,
    Refuse,
    Reload,
    Remember,
    RememberStop,
    Reply,
    Reshape,
    SetLimit,
    Unwatch,
    Watch,
)
from umad.core.history import History
from umad.core.pace import MOVES_A_LIMIT
from umad.core.ports import Probe
from umad.core.tape import RecordedEngine
from umad.daemon import reloading
from umad.daemon.adopt import Adoptions, kin_of, launched, running_unit
from umad.daemon.control import Channel, ControlServer
from umad.daemon.effects import DryRun, Effects
from umad.daemon.exporter import Exporter
from umad.daemon.logs import DECISIONS
from umad.daemon.metrics import MEDIA_TYPE, Metrics
from umad.daemon.pacing import Pacer
from umad.daemon.pages import Pages
from umad.daemon.recording import Recording
from umad.daemon.timeline import Timeline
from umad.errors import (
    ConfigError,
    InvariantBroken,
    ProbeError,
    RequestRejected,
    UmadError,
    VersionMismatch,
)
from umad.host import history, procs
from umad.host.family import FamilyFinder
from umad.host.notify import Notifier, PassedFd
from umad.host.pressure import PRESSURE
from umad.journal import Repeats
from umad.values import SYSTEM_POOL, Identity, Kin, Outsider, ProcessReading
from umad.wire.frames import Limits
from umad.wire.messages import PROTOCOL_VERSION, Notification, Request, check_params

_TOLD_MAX: Final = 8000


class Daemon:
    """Builds nothing and reads no configuration: main.py hands it its parts."""

    def __init__(
        self,
        settings: Settings,
        *,
        probe: Probe,
        access: Access,
        notifier: Notifier,
        log: structlog.typing.FilteringBoundLogger,
        generation: int,
        restarted: bool,
        kept: history.History,
        reread: Callable[[], Settings],
        pages: Sequence[PassedFd] = (),
        warnings: tuple[str, ...] = (),
        advice: tuple[str, ...] = (),
        permissive: tuple[str, ...] = (),
        dry_run: bool = False,
        fill_rate: int,
        ended: asyncio.Future[int],
    ) -> None:
        self._settings = settings
        self._reread = reread
        self._probe = probe
        self._notifier = notifier
        self._log = log
        self._repeats = Repeats(DECISIONS)
        self._preflight = {
            "warnings": list(warnings),
            "advice": list(advice),
            "permissive": list(permissive),
        }
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._started_s = now_s
        self.engine = RecordedEngine(
            settings,
            access,
            generation=generation,
            recovering_until_s=now_s + (settings.leases.recovery if restarted else 0.0),
            unix_offset_s=time.time() - now_s,
            fill_rate=fill_rate,
        )
        self.engine.state.history = History(kept.models, kept.stops)
        self._history = kept
        self._pages = Pages(generation, notifier)
        self._metrics = Metrics(self.engine, self._pages.guarded, self._loop.time)
        self._recording = Recording(self.engine.tape)
        self._timeline = Timeline(self.engine.unix_offset_s)
        self._kept = pages
        self._finder = FamilyFinder(settings.memory.root)
        self._adoptions = Adoptions(Path(settings.daemon.socket).parent, settings.memory.root)
        self._effects = (DryRun if dry_run else Effects)(self._loop, self._exited)
        self._server: ControlServer | None = None
        self._exporter: Exporter | None = None
        self._pacer = Pacer(self._loop, probe.glance, self._tick)
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._pinged_s = now_s
        self._told_ready = False
        self._memory_known = True
        self._ended = ended

    async def run(self, listener: socket.socket, scraped: socket.socket | None = None) -> int:
        """Serve until ``ended`` has an exit code; returns it.

        Args:
            listener: clients connect there.
            scraped: Prometheus does, where it is wanted.

        READY is told after the first look at memory, with the socket open: from then on a
        client gets true answers.
        """
        self._loop.set_exception_handler(self._failed)
        for passed in self._kept:
            try:
                self._found(self._pages.take_back(passed))
            except ProbeError as error:
                self._happened("page_dropped", "info", why=error.message)
        if self._history.problem:
            self._happened("history", "error", why=self._history.problem)
        self._history.start(lambda why: self._loop.call_soon_threadsafe(self._tell_of_history, why))
        if why := self._adoptions.load():
            self._happened("adoptions_lost", "error", why=why)
        self._look()
        self._server = ControlServer(
            self._loop,
            listener,
            self,
            connections_max=self._settings.daemon.connections_max,
            trusted_uids=frozenset({0, os.getuid()}),
            refused=lambda why: self._happened("protocol_violation", "warning", why=why),
        )
        if scraped is not None:
            self._exporter = Exporter(self._loop, scraped, self._metrics)
        self._told_ready = self._notifier.ready(self._status_line())
        self._log.info(
            "started",
            version=__version__,
            generation=self.engine.state.generation,
            socket=self._settings.daemon.socket,
            budget_bytes=self._budget(),
            fill_rate_bytes_per_s=self.engine.state.fill_rate,
        )
        if self._settings.memory.root == "/" and (why := self._pacer.listen(PRESSURE)):
            self._happened("no_pressure_alarm", "info", why=why)
        try:
            return await self._ended
        finally:
            self._close()

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: the books cannot be trusted any more.

        Say everything and end; systemd starts us again, and we rebuild from what is there.
        """
        error = context.get("exception")
        code = error.exit_code if isinstance(error, UmadError) else InvariantBroken.exit_code
        self._log.critical(
            "failed",
            why=str(error or context["message"]),
            where="".join(traceback.format_exception(error)) if error else "",
            state=self.engine.status(self._loop.time()),
        )
        if not self._ended.done():
            self._ended.set_result(code)

    # ------------------------------------------------------ control.Handler

    def opened(self, channel: Channel) -> None:
        """See control.Handler."""
        self._do(self.engine.connected(channel.id, channel.peer))

    def request(self, channel: Channel, message: Request) -> None:
        """See control.Handler."""
        try:
            params = check_params(message.method, message.params)
            if (told := self._told(channel, message.method, params)) is not None:
                channel.respond(message.id, told)
                return
            self.engine.check_allowed(channel.id, message.method)  # before anything is read
            process: ProcessReading | None = None
            outsider = self._outsider(channel, message.method, params)
            if outsider is not None:
                process = self._read(outsider.identity, kin_of(outsider))
            elif message.method == "register":
                process = self._read(channel.peer.identity, Kin(channel.peer.uid))
                self._adopt_page(channel)
        except RequestRejected as error:
            channel.respond(message.id, error=error.to_wire())
            return
        actions = self.engine.request(
            channel.id, message.id, message.method, params, self._loop.time(), process, outsider
        )
        self._do(actions)
        if outsider is not None or message.method in ("commit", "disown"):
            self._keep_adoptions(message.method, params, actions)
        if message.method in MOVES_A_LIMIT:
            self._pacer.hurry()
        answered = any(isinstance(action, Reply) for action in actions)
        if message.method == "release" and answered and len(self.engine.state.loads):
            self._tick()  # who waits for these bytes gets them when a look has seen them go
        if message.method == "status":
            return
        if not any(isinstance(action, Reply | Refuse) for action in actions):
            self._arm_deadline()  # it waits: its bound may be the next one

    def _told(
        self, channel: Channel, method: str, params: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        """The answer to what is the shell's own, nothing else: it decides nothing."""
        match method:
            case "hello":
                return self._hello(channel, params)
            case "metrics":
                return {"gzip": self._metrics.compressed(), "type": MEDIA_TYPE}
            case "snapshot":
                return self._recording.part(channel.id, params["part"], self._loop.time())
            case "timeline":
                return self._timeline.answer(params["since"])
        return None

    def notification(self, channel: Channel, message: Notification) -> None:
        """See control.Handler."""
        try:
            params = check_params(message.method, message.params)
        except RequestRejected as error:
            self._happened("protocol_violation", "info", why=error.message)
            return
        self._do(self.engine.notification(channel.id, message.method, params, self._loop.time()))

    def closed(self, channel: Channel, why: str) -> None:
        """See control.Handler."""
        if why:
            self.engine.state.counters["protocol_violations"] += 1
            self._happened("protocol_violation", "warning", pid=channel.peer.identity.pid, why=why)
        self._recording.forget(channel.id)
        self._do(self.engine.disconnected(channel.id, self._loop.time()))
        self._arm_deadline()

    def foreign(self, channel: Channel, pid: int) -> None:
        """See control.Handler."""
        self.engine.state.counters["foreign_senders"] += 1
        self._happened("foreign_sender", "warning", pid=channel.peer.identity.pid, sender_pid=pid)

    def idle_allowed(self, channel: Channel) -> bool:
        """See control.Handler."""
        client = self.engine.state.clients.get(channel.id)
        return client is not None and bool(client.workers or client.listening)

    # -------------------------------------------------------------- the tick

    def _tick(self) -> None:
        self._look()
        now_s = self._loop.time()
        self._tell_repeats(now_s)
        if not self._told_ready:  # systemd did not take it: its queue was full
            self._told_ready = self._notifier.ready(self._status_line())
        period_s = self._notifier.watchdog_period_s
        # Half an interval early rather than one interval late.
        early_s = self._settings.memory.interval / 2
        if period_s is not None and now_s - self._pinged_s >= min(period_s, 1.0) - early_s:
            self._pinged_s = now_s
            self._notifier.watchdog()
            self._notifier.status(self._status_line())

    def _look(self) -> None:
        """One look at memory and what follows from it."""
        began_s = self._loop.time()
        if self.engine.search_due(self._loop.time()):
            self._search()
        processes = self.engine.state.processes
        families = kin.counted(self.engine.state)
        snapshot = self._probe.sample(processes, self._loop.time(), families)
        snapshot = self._probe.confirm(snapshot, self.engine.limits())
        self._tell_if_unknown(snapshot.pools[SYSTEM_POOL].safe.problem)
        self._pages.settle()
        self._effects.retry()
        accounts = dict(self._pages.figures(self.engine.state.members))
        self._do(self.engine.observe(snapshot, self._loop.time(), accounts))
        self._timeline.looked(self.engine.state, self._loop.time())
        for outsider, wanted in self._adoptions.due(self.engine.state, self._loop.time()):
            self._take_over(outsider, wanted)
        self._keep_adoptions()
        self._arm_deadline()
        self._pacer.follow(self.engine.pace(self._loop.time()))
        self._metrics.looked(snapshot, self._loop.time() - began_s)

    def _arm_deadline(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        due_s = self.engine.next_deadline_s()
        if due_s is not None:
            self._deadline_timer = self._loop.call_at(due_s, self._deadline)

    def _deadline(self) -> None:
        self._do(self.engine.advance(self._loop.time()))
        self._arm_deadline()

    def _search(self, ended: Identity | None = None) -> None:
        """Find who belongs to the registered processes."""
        found = self._finder.find(kin.known(self.engine.state), ended)
        self._do(self.engine.searched(found, self._loop.time()))

    def _exited(self, identity: Identity) -> None:
        if identity in self.engine.state.processes:
            self._search(identity)
        self._do(self.engine.exited(identity, self._loop.time()))

    # --------------------------------------------------------------- actions

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Reply() | Refuse() | Notify():
                self._send(action)
            case Event():
                self._tell(action)
            case Kill(identity, reason):
                self._kill(identity, reason)
            case Watch(identity):
                self._effects.watch(identity)
            case Unwatch(identity):
                self._effects.unwatch(identity)
                self._pages.drop(identity)
            case Look():
                self._tick()
            case Compact():
                if why := self._effects.compact(Path(self._settings.daemon.socket).parent):
                    self._happened("compaction_not_asked", "warning", why=why)
            case OpenAccount() | SetLimit() | CloseAccount():
                self._perform_on_page(action)
            case Reload(connection, request):
                self._reload(connection, request)
            case Remember() | Reshape() | RememberStop():
                self._keep(action)

    def reload(self) -> reloading.Reloaded:
        """Go by the file as it is now; a bad one changes nothing.

        Raises:
            ConfigError: it cannot be used; the log says so, too.
        """
        try:
            reloaded = reloading.take(self._settings, self._reread())
        except ConfigError as error:
            self._happened("not_reloaded", "error", why=error.message)
            raise
        self._settings = reloaded.settings
        models_left_out = replace(reloaded.settings, models=())  # they are umad-serve's
        self._do(self.engine.reconfigure(models_left_out, self._loop.time()))
        return reloaded

    def _reload(self, connection: int, request: int) -> None:
        try:
            answer = self.reload().answer()
        except ConfigError as error:
            # All problems are in the text; the list of them may be longer than a message.
            told = ConfigError(error.message[:_TOLD_MAX])
            self._perform(Refuse(connection, request, told))
        else:
            self._perform(Reply(connection, request, answer))

    def _keep(self, action: Remember | Reshape | RememberStop) -> None:
        match action:
            case Remember(model, sample):
                self._history.observe(model, sample)
            case Reshape(model, shape):
                self._history.reshape(model, shape)
            case RememberStop(stop):
                self._history.stopped(stop)

    def _tell(self, event: Event) -> None:
        if event.name == "stopped":
            self._metrics.stopped(event.fields)
        self._happened(event.name, event.level, **event.fields)

    def _send(self, action: Reply | Refuse | Notify) -> None:
        channel = self._channel(action.connection)
        if channel is None:
            return
        match action:
            case Reply(_, request, result, page):
                fd = None if page is None else self._pages.fd(page)
                channel.respond(request, self._completed(result), fd=fd)
            case Refuse(_, request, error):
                channel.respond(request, error=error.to_wire())
            case Notify(_, method, params):
                channel.notify(method, params)

    def _perform_on_page(self, action: OpenAccount | SetLimit | CloseAccount) -> None:
        match action:
            case OpenAccount(identity, slot, limit, again):
                if why := self._pages.open(identity, slot, limit, again=again):
                    self._happened("account_failed", "warning", pid=identity.pid, why=why)
            case SetLimit(identity, slot, limit):
                self._pages.set_limit(identity, slot, limit)
            case CloseAccount(identity, slot):
                self._pages.close_account(identity, slot)

    def _adopt_page(self, channel: Channel) -> None:
        """A worker that comes back after our restart brings its process's account page."""
        fd = channel.take_fd()
        if fd is None:
            return
        try:
            if self._pages.adopt(channel.peer.identity, fd):
                self._found(channel.peer.identity)
        except ProbeError as error:
            self._happened(
                "protocol_violation", "warning", pid=channel.peer.identity.pid, why=error.message
            )
        finally:
            os.close(fd)

    def _found(self, identity: Identity) -> None:
        """A page from before our restart: its accounts go on before their workers are back."""
        comm, uid = procs.comm(identity.pid), procs.owner(identity.pid)
        figures, reading = self._pages.found(identity), self._read(identity, Kin(uid))
        now_s = self._loop.time()
        self._do(self.engine.found(identity, comm, uid, figures, reading, now_s))

    def _outsider(self, channel: Channel, method: str, params: dict[str, Any]) -> Outsider | None:
        """Of whom a request speaks that is not its sender."""
        root = self._settings.memory.root
        if method == "register" and "process" in params:
            return launched(channel.peer, params["process"], root)
        return running_unit(params["unit"], root) if method == "adopt" else None

    def _keep_adoptions(
        self, method: str = "", params: Mapping[str, Any] | None = None, did: Iterable[Action] = ()
    ) -> None:
        """Note who came under quota by another's word, or is no more."""
        if params is not None and any(isinstance(action, Reply) for action in did):
            if method == "adopt":
                self._adoptions.adopted(params)
            elif method == "disown":
                self._adoptions.disowned(params["name"])
        if why := self._adoptions.keep(self.engine.state):
            self._happened("adoptions_not_kept", "error", why=why)

    def _take_over(self, outsider: Outsider, params: Mapping[str, Any]) -> None:
        """Put a running program under quota that nobody has asked for just now."""
        reading = self._read(outsider.identity, kin_of(outsider))
        try:
            self._do(self.engine.running(outsider, params, reading, self._loop.time()))
        except RequestRejected as error:
            if self._adoptions.refused(params["model"], error.message):
                fields = {"worker": params["model"], "unit": outsider.unit}
                self._happened("not_adopted", "warning", **fields, why=error.message)

    def _kill(self, identity: Identity, reason: str) -> None:
        problem = self._effects.kill(identity)
        self.engine.kill_sent(identity, self._loop.time())
        if problem:
            self._log.error("kill_failed", pid=identity.pid, reason=reason, why=problem)

    def _hello(self, channel: Channel, params: dict[str, Any]) -> dict[str, Any]:
        if PROTOCOL_VERSION not in params["versions"]:
            raise VersionMismatch(
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, the client "
                f"{params['versions']}"
            )
        state = self.engine.state
        state.clients[channel.id].name = params["client"]
        limits = Limits()
        return {
            "version": PROTOCOL_VERSION,
            "daemon": f"umad {__version__}",
            "generation": state.generation,
            "recovering": state.recovering(self._loop.time()),
            "limits": {
                "message_bytes": limits.message_bytes,
                "open_requests": limits.open_requests,
            },
        }

    def _completed(self, result: Any) -> Any:
        """What only the shell knows is added to a status."""
        if "pools" in result:
            for process in result["processes"]:
                process["guard"] = self._pages.guarded(process["pid"])
            return {
                "daemon": {
                    "version": __version__,
                    "pid": os.getpid(),
                    "uptime_s": round(self._loop.time() - self._started_s, 1),
                    "socket": self._settings.daemon.socket,
                    "conservative": self._settings.memory.conservative,
                    **self._preflight,
                },
                **result,
            }
        return result

    def _channel(self, connection: int) -> Channel | None:
        return None if self._server is None else self._server.channels.get(connection)

    def _read(self, identity: Identity, mine: Kin) -> ProcessReading:
        """A fresh reading of one process and its family."""
        state = self.engine.state
        families = kin.counted(state)
        if identity not in state.processes:
            found = self._finder.find({**kin.known(state), identity: mine})
            # The one that asks may have been counted with a parent that registered before it.
            families = {who: members - {identity} for who, members in families.items()}
            families[identity] = found[identity] - state.processes.keys()
        wanted = (*state.processes, identity)
        return self._probe.sample(wanted, self._loop.time(), families).processes[identity]

    def _happened(self, event: str, level: str, **fields: Any) -> None:
        now_s = self._loop.time()
        self._tell_repeats(now_s)
        if self._repeats.offer(event, level, fields, now_s):
            getattr(self._log, level)(event, **fields)

    def _tell_repeats(self, now_s: float) -> None:
        for told in self._repeats.due(now_s):
            getattr(self._log, told.level)(told.event, **told.fields)

    def _tell_if_unknown(self, problem: str) -> None:
        """Say once that memory cannot be read, and once that it can again."""
        if bool(problem) == self._memory_known:
            self._memory_known = not problem
            if problem:
                self._log.error("memory_unknown", why=problem)
            else:
                self._log.info("memory_known")

    def _tell_of_history(self, problem: str) -> None:
        if problem:
            self._log.error("history", why=problem)
        else:
            self._log.info("history_written")

    def _status_line(self) -> str:
        state = self.engine.state
        ready = sum(member.state == "ready" for member in state.members.values())
        problem = "" if self._memory_known else ", MEMORY UNKNOWN"
        return f"{ready}/{len(state.members)} workers ready{problem}"

    def _budget(self) -> int | None:
        pool = self.engine.state.ledger.pools.get(SYSTEM_POOL)
        return None if pool is None else pool.budget

    def _close(self) -> None:
        self._notifier.stopping()
        self._tell_repeats(math.inf)
        self._log.info("stopping")
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._pacer.close()
        if self._exporter is not None:
            self._exporter.close()
        if self._server is not None:
            self._server.close()
        self._effects.close()
        self._pages.close()
        self._history.close()
