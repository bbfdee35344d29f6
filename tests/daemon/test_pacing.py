"""When the next look comes: by the timer, by a glance, by the kernel's alarm."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from umad.core.pace import FAST_PACE_S, GLANCE_S, Pace, Watched
from umad.daemon.pacing import Pacer
from umad.units import GIB, MIB
from umad.values import Identity

A = Identity(7, 700)
CALM = Pace(60.0)
NEAR = Pace(60.0, GLANCE_S, "near_limit", 10 * GIB, {A: 100 * MIB})


class Scripted:
    """Glances that show one figure after the other, and then the last one for ever."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.glances = 0

    def __call__(self, wanted: Collection[Watched]) -> dict[Watched, int]:
        self.glances += 1
        return dict.fromkeys(wanted, self.held.pop(0) if len(self.held) > 1 else self.held[0])


def looks(
    glance: Scripted, paces: list[Pace], then: Callable[[Pacer], object], within_s: float
) -> list[float]:
    """When the first look came, in seconds, if it came; ``paces`` are followed, then ``then``."""

    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        seen, times = asyncio.Event(), list[float]()
        began_s = loop.time()

        def look() -> None:
            times.append(loop.time() - began_s)
            pacer.follow(CALM)
            seen.set()

        pacer = Pacer(loop, glance, look)
        for pace in paces:
            pacer.follow(pace)
        then(pacer)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(seen.wait(), within_s)
        pacer.close()
        return times

    return asyncio.run(scenario())


def nothing(pacer: Pacer) -> None:
    """Happens meanwhile."""


def hurry_twice(pacer: Pacer) -> None:
    pacer.hurry()
    pacer.hurry()


def test_the_look_comes_when_it_is_due() -> None:
    glance = Scripted(0)
    assert len(looks(glance, [Pace(0.01)], nothing, 2)) == 1
    assert glance.glances == 0


def test_a_glance_past_the_room_is_followed_by_a_look() -> None:
    glance = Scripted(500 * MIB, 500 * MIB, 560 * MIB, 580 * MIB, 600 * MIB)
    [at_s] = looks(glance, [NEAR], nothing, 2)
    assert glance.glances == 5
    assert at_s >= 2 * GLANCE_S


def test_at_rest_there_are_glances_and_no_look() -> None:
    glance = Scripted(500 * MIB)
    assert looks(glance, [NEAR], nothing, 0.15) == []
    assert 2 <= glance.glances <= 8


def test_no_glance_is_left_over_after_a_look() -> None:
    glance = Scripted(500 * MIB)
    assert looks(glance, [NEAR, CALM], nothing, 0.05) == []
    assert glance.glances == 1  # the figure that the others would have begun from


def test_a_limit_that_moved_hurries_the_look_but_puts_none_off() -> None:
    [at_s] = looks(Scripted(0), [CALM], hurry_twice, 2)
    assert at_s >= GLANCE_S - 0.001
    [at_s] = looks(Scripted(0), [Pace(0.005)], hurry_twice, 2)
    assert at_s < GLANCE_S


@pytest.fixture
def urgent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A file that opens as a socket: what is sent urgently shows as POLLPRI, as an alarm does."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    real, path = os.open, str(tmp_path / "memory")

    def opened(wanted: str, *flags: int) -> int:
        return os.dup(theirs.fileno()) if wanted == path else real(wanted, *flags)

    monkeypatch.setattr("umad.host.pressure.os.open", opened)
    with ours, theirs:
        yield path, ours


def test_the_kernels_alarm_wakes_a_look_soon(urgent: tuple[str, socket.socket]) -> None:
    path, kernel = urgent
    told: list[str] = []

    def listen(pacer: Pacer) -> None:
        told.append(pacer.listen(path))

    kernel.send(b"readable all the time, as the kernel's file is")
    assert looks(Scripted(0), [CALM], listen, 0.05) == []
    kernel.send(b"!", socket.MSG_OOB)
    [at_s] = looks(Scripted(0), [CALM], listen, 2)
    assert at_s >= FAST_PACE_S - 0.001  # not in the moment of a look
    assert told == ["", ""]


def test_no_alarm_is_said_and_nothing_else(tmp_path: Path) -> None:
    told: list[str] = []
    path = str(tmp_path / "memory")
    assert len(looks(Scripted(0), [Pace(0.01)], lambda p: told.append(p.listen(path)), 2)) == 1
    assert told == [f"{path}: No such file or directory"]
