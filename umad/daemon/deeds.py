"""Carries out what core wants done: each action its deed, in the order core has put them.

Owns what a deed that fails leads to: it is told of and never raised, for the actions after it
must be done in any case.  A connection that has gone meanwhile hears nothing, and whoever asked
for a bad configuration is refused.
Stays out: how it is done (effects.py, pages.py, control.py, umad.host.history), what is to be done
(core), and when the machine is looked at and how settings change (loop.py): those two are asked
for, and may bring further actions, which are done at once.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

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
from umad.core.engine import Engine
from umad.daemon.answers import Answers
from umad.daemon.control import Channel
from umad.daemon.effects import Doer
from umad.daemon.metrics import Metrics
from umad.daemon.pages import Pages
from umad.daemon.reloading import Reloaded
from umad.daemon.telling import Teller
from umad.errors import ConfigError
from umad.host.history import History
from umad.values import Identity

_TOLD_MAX: Final = 8000


class Deeds:
    """See the module.

    Args:
        engine: hears that a kill was sent.
        now_s: the loop's clock.
        folder: the runtime folder.
        look: takes a look at memory.
        reload: goes by the file as it is now; raises ConfigError for a bad one.
        channel: the connection of this number, while it is open.
    """

    def __init__(
        self,
        engine: Engine,
        now_s: Callable[[], float],
        folder: Path,
        *,
        tell: Teller,
        answers: Answers,
        effects: Doer,
        pages: Pages,
        history: History,
        metrics: Metrics,
        look: Callable[[], None],
        reload: Callable[[], Reloaded],
        channel: Callable[[int], Channel | None],
    ) -> None:
        self._engine = engine
        self._now_s = now_s
        self._folder = folder
        self._tell = tell
        self._answers = answers
        self._effects = effects
        self._pages = pages
        self._history = history
        self._metrics = metrics
        self._look = look
        self._go_by_file = reload
        self._channel = channel

    def do(self, actions: Iterable[Action]) -> None:
        """Carry them out."""
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Reply() | Refuse() | Notify():
                self._send(action)
            case Event():
                self._log(action)
            case Kill(identity, reason):
                self._kill(identity, reason)
            case Watch(identity):
                self._effects.watch(identity)
            case Unwatch(identity):
                self._effects.unwatch(identity)
                self._pages.drop(identity)
            case Look():
                self._look()
            case Compact():
                if why := self._effects.compact(self._folder):
                    self._tell.happened("compaction_not_asked", "warning", why=why)
            case OpenAccount() | SetLimit() | CloseAccount():
                self._perform_on_page(action)
            case Reload(connection, request):
                self._reload(connection, request)
            case Remember() | Reshape() | RememberStop():
                self._keep(action)

    def _send(self, action: Reply | Refuse | Notify) -> None:
        channel = self._channel(action.connection)
        if channel is None:
            return
        match action:
            case Reply(_, request, result, page):
                fd = None if page is None else self._pages.fd(page)
                channel.respond(request, self._answers.completed(result), fd=fd)
            case Refuse(_, request, error):
                channel.respond(request, error=error.to_wire())
            case Notify(_, method, params):
                channel.notify(method, params)

    def _log(self, event: Event) -> None:
        if event.name == "stopped":
            self._metrics.stopped(event.fields)
        self._tell.happened(event.name, event.level, **event.fields)

    def _kill(self, identity: Identity, reason: str) -> None:
        problem = self._effects.kill(identity)
        self._engine.kill_sent(identity, self._now_s())
        if problem:
            self._tell.at_once("kill_failed", "error", pid=identity.pid, reason=reason, why=problem)

    def _perform_on_page(self, action: OpenAccount | SetLimit | CloseAccount) -> None:
        match action:
            case OpenAccount(identity, slot, limit, again):
                if why := self._pages.open(identity, slot, limit, again=again):
                    self._tell.happened("account_failed", "warning", pid=identity.pid, why=why)
            case SetLimit(identity, slot, limit):
                self._pages.set_limit(identity, slot, limit)
            case CloseAccount(identity, slot):
                self._pages.close_account(identity, slot)

    def _reload(self, connection: int, request: int) -> None:
        try:
            answer = self._go_by_file().answer()
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
