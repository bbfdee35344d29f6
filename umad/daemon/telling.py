"""What the daemon tells of itself: events to the journal, its state to systemd.

Owns what was told last, so that nothing is told twice or too often: the repeats that are held
back, whether systemd has taken READY, the last ping, whether memory was known.  Rules: systemd is
pinged only after a finished tick, so that a hung loop is noticed and restarted; what could not be
told to systemd is told at the next tick; a line that was held back comes before a later one.
Stays out: where lines go and their MESSAGE_IDs (logs.py), which repeats are held back
(umad.journal), how systemd is talked to (umad.host.notify).
"""

import math
from collections.abc import Callable
from typing import Any

import structlog

from umad.core.state import State
from umad.daemon.logs import DECISIONS
from umad.host.notify import Notifier
from umad.journal import Repeats


class Teller:
    """See the module.

    Args:
        log: where lines go.
        notifier: systemd.
        state: of the engine; its workers are in the line for ``systemctl status``.
        now_s: the loop's clock.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        notifier: Notifier,
        state: State,
        now_s: Callable[[], float],
    ) -> None:
        self._log = log
        self._notifier = notifier
        self._state = state
        self._now_s = now_s
        self._repeats = Repeats(DECISIONS)
        self._pinged_s = now_s()
        self._told_ready = False
        self._memory_known = True

    def happened(self, event: str, level: str, **fields: Any) -> None:
        """Log an event, unless it repeats too often; ``level`` is a logging level's name."""
        now_s = self._now_s()
        self._tell_repeats(now_s)
        if self._repeats.offer(event, level, fields, now_s):
            getattr(self._log, level)(event, **fields)

    def at_once(self, event: str, level: str, **fields: Any) -> None:
        """Log an event whatever was logged before: what can come once, or must not be missed."""
        getattr(self._log, level)(event, **fields)

    def memory(self, problem: str) -> None:
        """Say once that memory cannot be read, and once that it can again ("")."""
        if bool(problem) == self._memory_known:
            self._memory_known = not problem
            if problem:
                self._log.error("memory_unknown", why=problem)
            else:
                self._log.info("memory_known")

    def history(self, problem: str) -> None:
        """The file of what models took cannot be written any more, or can again ("")."""
        if problem:
            self._log.error("history", why=problem)
        else:
            self._log.info("history_written")

    def ready(self) -> None:
        """The start is finished: true answers from now on."""
        self._told_ready = self._notifier.ready(self._status_line())

    def ticked(self) -> None:
        """A tick of the loop is finished."""
        now_s = self._now_s()
        self._tell_repeats(now_s)
        if not self._told_ready:  # systemd did not take it: its queue was full
            self.ready()
        period_s = self._notifier.watchdog_period_s
        # Half an interval early rather than one interval late.
        early_s = self._state.settings.memory.interval / 2
        if period_s is not None and now_s - self._pinged_s >= min(period_s, 1.0) - early_s:
            self._pinged_s = now_s
            self._notifier.watchdog()
            self._notifier.status(self._status_line())

    def stopping(self) -> None:
        """The end has begun: what is held back is told now or never."""
        self._notifier.stopping()
        self._tell_repeats(math.inf)
        self._log.info("stopping")

    def _tell_repeats(self, now_s: float) -> None:
        for told in self._repeats.due(now_s):
            getattr(self._log, told.level)(told.event, **told.fields)

    def _status_line(self) -> str:
        members = self._state.members.values()
        ready = sum(member.state == "ready" for member in members)
        problem = "" if self._memory_known else ", MEMORY UNKNOWN"
        return f"{ready}/{len(members)} workers ready{problem}"
