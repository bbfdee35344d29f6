"""Waits for the next look at memory: its timer, the glances before it, the kernel's alarm.

What is waited for is core's (``core.pace``); here are the timers and the readings.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from umad.core.pace import FAST_PACE_S, GLANCE_S, Pace, Watched, next_glance_s
from umad.host.files import Unreadable
from umad.host.pressure import PressureAlarm


class Pacer:
    """Calls ``look`` when it is time; ``follow`` after each look, whoever asked for it.

    Args:
        loop: the daemon's.
        glance: see ``core.ports.Probe``.
        look: has to end in ``follow``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        glance: Callable[[Collection[Watched]], Mapping[Watched, int]],
        look: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._read = glance
        self._look = look
        self._pace = Pace(GLANCE_S)
        self._looked_s = loop.time()
        self._look_timer: asyncio.TimerHandle | None = None
        self._glance_timer: asyncio.TimerHandle | None = None
        self._first: Mapping[Watched, int] = {}
        self._before: Mapping[Watched, int] = {}
        self._before_s = 0.0
        self._alarm: PressureAlarm | None = None

    def listen(self, path: str) -> str:
        """Let the kernel's alarm at /proc/pressure/memory wake us; returns why it cannot."""
        try:
            self._alarm = PressureAlarm(path)
        except Unreadable as error:
            return str(error)
        self._loop.add_reader(self._alarm.fileno(), self._alarmed)
        return ""

    def follow(self, pace: Pace) -> None:
        """There was a look just now; this is what comes next."""
        self._cancel()
        self._pace = pace
        self._looked_s = self._loop.time()
        self._look_timer = self._loop.call_at(self._looked_s + pace.look_s, self._look)
        if pace.glance_s is not None:
            self._first = self._before = self._read(pace.rooms)
            self._before_s = self._looked_s
            self._glance_timer = self._loop.call_at(self._looked_s + pace.glance_s, self._glance)

    def hurry(self) -> None:
        """A limit has moved, and the glances know the old one: look soon."""
        self._look_by(self._loop.time() + GLANCE_S)

    def close(self) -> None:
        """No more looks."""
        self._cancel()
        if self._alarm is not None:
            self._loop.remove_reader(self._alarm.fileno())
            self._alarm.close()

    def _glance(self) -> None:
        now_s = self._loop.time()
        held = self._read(self._pace.rooms)
        passed_s = now_s - self._before_s
        wait_s = next_glance_s(self._pace, self._first, self._before, held, passed_s)
        if wait_s == 0:
            self._look()
            return
        self._before, self._before_s = held, now_s
        if now_s + wait_s < self._looked_s + self._pace.look_s:
            self._glance_timer = self._loop.call_at(now_s + wait_s, self._glance)

    def _alarmed(self) -> None:
        if self._alarm is not None:
            self._alarm.take()
        self._look_by(max(self._loop.time(), self._looked_s + FAST_PACE_S))

    def _look_by(self, due_s: float) -> None:
        if self._look_timer is not None and self._look_timer.when() > due_s:
            self._look_timer.cancel()
            self._look_timer = self._loop.call_at(due_s, self._look)

    def _cancel(self) -> None:
        for timer in (self._look_timer, self._glance_timer):
            if timer is not None:
                timer.cancel()
