"""Signals: through a checked descriptor, and never at whom umad descends from."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.running import ROOT
from umad.daemon import effects
from umad.daemon.effects import Effects
from umad.errors import ProbeError
from umad.host import procs
from umad.host.procs import process_identity
from umad.values import Identity


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identity_of(pid: int) -> Identity:
    found = process_identity(pid)
    assert found is not None
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kill(identity: Identity, before: Callable[[Effects], object] = lambda _: None) -> str:
    """What a kill says; the loop has done all that follows from it."""

    async def act() -> str:
        made = Effects(asyncio.get_running_loop(), lambda _: None)
        before(made)
        said = made.kill(identity)
        made.close()
        await asyncio.get_running_loop().shutdown_default_executor()
        return said

    return asyncio.run(act())


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("releasing", [1, 0])
def test_a_process_is_killed_watched_or_not(
    child: subprocess.Popen[bytes],
    watched: bool,
    releasing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(effects, "RELEASING_MAX", releasing)
    identity = identity_of(child.pid)
    before = descriptors()
    said = kill(identity, (lambda made: made.watch(identity)) if watched else lambda _: None)
    assert said == ""
    assert child.wait(10) == -9
    assert descriptors() == before


def test_another_process_with_the_pid_is_not_hit(child: subprocess.Popen[bytes]) -> None:
    was = identity_of(child.pid)
    assert kill(Identity(child.pid, was.start_ticks - 1)) == "", "that one is gone"
    assert child.poll() is None


def test_a_kill_needs_no_thread(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be too short for one at just that moment."""

    async def act() -> None:
        loop = asyncio.get_running_loop()

        def no_thread(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(loop, "run_in_executor", no_thread)
        made = Effects(loop, lambda _: None)
        assert made.kill(identity_of(child.pid)) == ""
        made.close()

    before = descriptors()
    asyncio.run(act())
    assert child.wait(10) == -9
    assert descriptors() == before


def test_without_a_descriptor_a_living_process_is_not_taken_for_dead(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = identity_of(child.pid)
    real = procs.open_pidfd

    def none_left(_: Identity) -> int:
        raise ProbeError("no descriptor is left")

    async def act() -> None:
        ended = asyncio.Event()
        made = Effects(asyncio.get_running_loop(), lambda _: ended.set())
        monkeypatch.setattr(procs, "open_pidfd", none_left)
        made.watch(identity)
        made.retry()
        await asyncio.sleep(0)
        assert not ended.is_set()
        monkeypatch.setattr(procs, "open_pidfd", real)
        made.retry()
        child.kill()
        await asyncio.wait_for(ended.wait(), 10)
        made.close()

    asyncio.run(act())


def test_who_is_gone_needs_no_signal(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child.pid)
    child.kill()
    child.wait()
    assert kill(identity) == ""


PROGRAM = """
import asyncio, os, sys
from umad.daemon.effects import Effects
from umad.host.procs import process_identity

async def act():
    made = Effects(asyncio.get_running_loop(), lambda _: None)
    for pid in (int(sys.argv[1]), os.getppid()):
        print(made.kill(process_identity(pid)))

asyncio.run(act())
"""


def test_umad_never_kills_whom_it_descends_from() -> None:
    # Two shells above it, each of which has more to do; none but theirs is ever aimed at.
    inner = f'"{sys.executable}" -c "$0" $1; echo inner'
    outer = f"sh -c '{inner}' \"$0\" $$; echo outer"
    done = subprocess.run(
        ["sh", "-c", outer, PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["inner", "outer"]
    assert len(lines) == 4
    assert set(lines[:2]) == {"umad never kills itself, nor pid 1, nor whom it descends from"}
