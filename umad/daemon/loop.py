"""The one loop that owns all state: messages in, looks at memory; what follows goes to deeds.py.

Owns the engine, the order of a look and the moments of it, and what is read of the machine for a
request.  Everything runs in one thread, so the engine needs no lock; where a callback raises, the
books cannot be trusted any more, and the daemon ends.
Stays out: how actions are carried out (deeds.py), what the shell itself answers (answers.py), what
the journal and systemd are told (telling.py).
"""

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from umad import __version__
from umad.config import Settings
from umad.core import deadlines, kin
from umad.core.access import Access
from umad.core.actions import Refuse, Reply
from umad.core.history import History
from umad.core.pace import MOVES_A_LIMIT
from umad.core.ports import Probe
from umad.core.tape import RecordedEngine
from umad.daemon import reloading
from umad.daemon.adopt import Adoptions, kin_of
from umad.daemon.answers import Answers
from umad.daemon.control import Channel, ControlServer
from umad.daemon.deeds import Deeds
from umad.daemon.effects import DryRun, Effects
from umad.daemon.exporter import Exporter
from umad.daemon.metrics import Metrics
from umad.daemon.pacing import Pacer
from umad.daemon.pages import Pages
from umad.daemon.telling import Teller
from umad.daemon.timeline import Timeline
from umad.errors import ConfigError, InvariantBroken, ProbeError, RequestRejected, UmadError
from umad.host import history, procs
from umad.host.family import FamilyFinder
from umad.host.notify import Notifier, PassedFd
from umad.host.pressure import PRESSURE
from umad.values import SYSTEM_POOL, Identity, Kin, Outsider, ProcessReading
from umad.wire.messages import Notification, Request, check_params


class Daemon:
    """One daemon, from its start to its end; what it is to be and to run on is main.py's."""

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
        preflight: Mapping[str, Sequence[str]],
        dry_run: bool = False,
        fill_rate: int,
        ended: asyncio.Future[int],
    ) -> None:
        self._settings = settings
        self._reread = reread
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
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
        self._tell = Teller(log, notifier, self.engine.state, self._loop.time)
        self._pages = Pages(generation, notifier)
        self._metrics = Metrics(self.engine, self._pages.guarded, self._loop.time)
        self._timeline = Timeline(self.engine.unix_offset_s)
        self._answers = Answers(
            self.engine,
            self._loop.time,
            metrics=self._metrics,
            timeline=self._timeline,
            preflight=preflight,
            guarded=self._pages.guarded,
        )
        self._kept = pages
        self._finder = FamilyFinder(settings.memory.root)
        folder = Path(settings.daemon.socket).parent
        self._adoptions = Adoptions(folder, settings.memory.root)
        self._effects = (DryRun if dry_run else Effects)(self._loop, self._exited)
        self._do = Deeds(
            self.engine,
            self._loop.time,
            folder,
            tell=self._tell,
            answers=self._answers,
            effects=self._effects,
            pages=self._pages,
            history=kept,
            metrics=self._metrics,
            look=self._tick,
            reload=self.reload,
            channel=self._channel,
        ).do
        self._server: ControlServer | None = None
        self._exporter: Exporter | None = None
        self._pacer = Pacer(self._loop, probe.glance, self._tick)
        self._deadline_timer: asyncio.TimerHandle | None = None
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
                self._tell.happened("page_dropped", "info", why=error.message)
        if self._history.problem:
            self._tell.happened("history", "error", why=self._history.problem)
        self._history.start(lambda why: self._loop.call_soon_threadsafe(self._tell.history, why))
        if why := self._adoptions.load():
            self._tell.happened("adoptions_lost", "error", why=why)
        self._look()
        self._server = ControlServer(
            self._loop,
            listener,
            self,
            connections_max=self._settings.daemon.connections_max,
            trusted_uids=frozenset({0, os.getuid()}),
            refused=lambda why: self._tell.happened("protocol_violation", "warning", why=why),
        )
        if scraped is not None:
            self._exporter = Exporter(self._loop, scraped, self._metrics)
        self._tell.ready()
        self._tell.at_once(
            "started",
            "info",
            version=__version__,
            generation=self.engine.state.generation,
            socket=self._settings.daemon.socket,
            budget_bytes=self._budget(),
            fill_rate_bytes_per_s=self.engine.state.fill_rate,
        )
        if self._settings.memory.root == "/" and (why := self._pacer.listen(PRESSURE)):
            self._tell.happened("no_pressure_alarm", "info", why=why)
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
        self._tell.at_once(
            "failed",
            "critical",
            why=str(error or context["message"]),
            where="".join(traceback.format_exception(error)) if error else "",
            state=self.engine.status(self._loop.time()),
        )
        if not self._ended.done():
            self._ended.set_result(code)

    def reload(self) -> reloading.Reloaded:
        """Go by the file as it is now; a bad one changes nothing.

        Raises:
            ConfigError: it cannot be used; the log says so, too.
        """
        try:
            reloaded = reloading.take(self._settings, self._reread())
        except ConfigError as error:
            self._tell.happened("not_reloaded", "error", why=error.message)
            raise
        self._settings = reloaded.settings
        models_left_out = replace(reloaded.settings, models=())  # they are umad-serve's
        self._do(self.engine.reconfigure(models_left_out, self._loop.time()))
        return reloaded

    # ------------------------------------------------------ control.Handler

    def opened(self, channel: Channel) -> None:
        """See control.Handler."""
        self._do(self.engine.connected(channel.id, channel.peer))

    def request(self, channel: Channel, message: Request) -> None:
        """See control.Handler."""
        try:
            params = check_params(message.method, message.params)
            if (told := self._answers.of(channel.id, message.method, params)) is not None:
                channel.respond(message.id, told)
                return
            self.engine.check_allowed(channel.id, message.method)  # before anything is read
            process: ProcessReading | None = None
            outsider = self._adoptions.outsider(channel.peer, message.method, params)
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
        answered = any(isinstance(action, Reply) for action in actions)
        if outsider is not None or message.method in ("commit", "disown"):
            if answered:
                self._adoptions.answered(message.method, params)
            self._keep_adoptions()
        if message.method in MOVES_A_LIMIT:
            self._pacer.hurry()
        if message.method == "release" and answered and len(self.engine.state.loads):
            self._tick()  # who waits for these bytes gets them when a look has seen them go
        if message.method == "status":
            return
        if not any(isinstance(action, Reply | Refuse) for action in actions):
            self._arm_deadline()  # it waits: its bound may be the next one

    def notification(self, channel: Channel, message: Notification) -> None:
        """See control.Handler."""
        try:
            params = check_params(message.method, message.params)
        except RequestRejected as error:
            self._tell.happened("protocol_violation", "info", why=error.message)
            return
        self._do(self.engine.notification(channel.id, message.method, params, self._loop.time()))

    def closed(self, channel: Channel, why: str) -> None:
        """See control.Handler."""
        if why:
            self.engine.state.counters["protocol_violations"] += 1
            self._tell.happened(
                "protocol_violation", "warning", pid=channel.peer.identity.pid, why=why
            )
        self._answers.forget(channel.id)
        self._do(self.engine.disconnected(channel.id, self._loop.time()))
        self._arm_deadline()

    def foreign(self, channel: Channel, pid: int) -> None:
        """See control.Handler."""
        self.engine.state.counters["foreign_senders"] += 1
        self._tell.happened(
            "foreign_sender", "warning", pid=channel.peer.identity.pid, sender_pid=pid
        )

    def idle_allowed(self, channel: Channel) -> bool:
        """See control.Handler."""
        client = self.engine.state.clients.get(channel.id)
        return client is not None and bool(client.workers or client.listening)

    # -------------------------------------------------------------- the tick

    def _tick(self) -> None:
        self._look()
        self._tell.ticked()

    def _look(self) -> None:
        """One look at memory and what follows from it."""
        began_s = self._loop.time()
        if self.engine.search_due(self._loop.time()):
            self._search()
        processes = self.engine.state.processes
        families = kin.counted(self.engine.state)
        snapshot = self._probe.sample(processes, self._loop.time(), families)
        snapshot = self._probe.confirm(snapshot, self.engine.limits())
        self._tell.memory(snapshot.pools[SYSTEM_POOL].safe.problem)
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
        due_s = deadlines.next_s(self.engine.state)
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

    # ------------------------------------------- who comes with more than words

    def _adopt_page(self, channel: Channel) -> None:
        """A worker that comes back after our restart brings its process's account page."""
        fd = channel.take_fd()
        if fd is None:
            return
        try:
            if self._pages.adopt(channel.peer.identity, fd):
                self._found(channel.peer.identity)
        except ProbeError as error:
            self._tell.happened(
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

    def _keep_adoptions(self) -> None:
        if why := self._adoptions.keep(self.engine.state):
            self._tell.happened("adoptions_not_kept", "error", why=why)

    def _take_over(self, outsider: Outsider, params: Mapping[str, Any]) -> None:
        """Put a running program under quota that nobody has asked for just now."""
        reading = self._read(outsider.identity, kin_of(outsider))
        try:
            self._do(self.engine.running(outsider, params, reading, self._loop.time()))
        except RequestRejected as error:
            if self._adoptions.refused(params["model"], error.message):
                fields = {"worker": params["model"], "unit": outsider.unit}
                self._tell.happened("not_adopted", "warning", **fields, why=error.message)

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

    def _budget(self) -> int | None:
        pool = self.engine.state.ledger.pools.get(SYSTEM_POOL)
        return None if pool is None else pool.budget

    def _close(self) -> None:
        self._tell.stopping()
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
