"""What the daemon does to the world: watch processes, kill them.

Owns the pidfds.  A signal goes through the pidfd that was opened when the worker registered, or
one that is opened for a member of its family and checked, so that a pid that was reused meanwhile
is never hit.  ``DryRun`` stands in for ``Effects`` and
only tells what would have been done.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from umad.errors import ProbeError
from umad.host import procs, zones
from umad.values import Identity

RELEASING_MAX: Final = 64


class Doer(Protocol):
    """The seam that ``--dry-run`` swaps."""

    def watch(self, identity: Identity) -> None:
        """Report this process's end."""
        ...

    def unwatch(self, identity: Identity) -> None:
        """No more interest."""
        ...

    def retry(self) -> None:
        """Watch those whom it could not before."""
        ...

    def kill(self, identity: Identity) -> str:
        """SIGKILL it; returns what went wrong, or nothing."""
        ...

    def compact(self, runtime_dir: Path) -> str:
        """Ask for the machine's memory to be compacted; returns what went wrong, or nothing."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Effects:
    """The real thing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, exited: Callable[[Identity], None]) -> None:
        self._loop = loop
        self._exited = exited
        self._pidfds: dict[Identity, int] = {}
        self._unwatched: set[Identity] = set()
        self._releasing = 0

    def retry(self) -> None:
        """Watch those for whom no descriptor was left."""
        again, self._unwatched = self._unwatched, set()
        for identity in again:
            self.watch(identity)

    def watch(self, identity: Identity) -> None:
        """Open the pidfd; a process that has ended meanwhile is reported at once."""
        if identity in self._pidfds:
            return
        try:
            pidfd = procs.open_pidfd(identity)
        except ProbeError:
            if procs.is_alive(identity):  # no descriptor is left: its end is seen by the looks
                self._unwatched.add(identity)
            else:
                self._loop.call_soon(self._exited, identity)
            return
        self._pidfds[identity] = pidfd
        self._loop.add_reader(pidfd, self._ended, identity)

    def unwatch(self, identity: Identity) -> None:
        """Close the pidfd."""
        self._unwatched.discard(identity)
        pidfd = self._pidfds.pop(identity, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def kill(self, identity: Identity) -> str:
        """SIGKILL through the pidfd, then let the kernel take the memory back at once."""
        if identity.pid in {0, 1, *procs.lineage(os.getpid())}:
            return "umad never kills itself, nor pid 1, nor whom it descends from"
        watched = self._pidfds.get(identity)
        try:
            pidfd = procs.open_pidfd(identity) if watched is None else watched
        except ProbeError as error:
            return error.message if procs.is_alive(identity) else ""
        try:
            if procs.kill_via(pidfd, signal.SIGKILL):
                self._release_memory(pidfd)
        except ProbeError as error:
            return error.message
        finally:
            if watched is None:
                os.close(pidfd)
        return ""

    def _release_memory(self, pidfd: int) -> None:
        """Freeing gigabytes takes tens of milliseconds: in a thread, on a descriptor of its own.

        The given one is closed before.  Who is not helped so frees its memory as it exits.
        """
        if self._releasing >= RELEASING_MAX:
            return
        try:
            own = os.dup(pidfd)
        except OSError:  # no descriptor is left
            return
        try:
            done = self._loop.run_in_executor(None, _release_memory, own)
        except RuntimeError:  # no thread can be started, as may be when memory is short
            os.close(own)
            return
        self._releasing += 1
        done.add_done_callback(self._released)

    def _released(self, _done: object) -> None:
        self._releasing -= 1

    def compact(self, runtime_dir: Path) -> str:
        """Ask umad-compact.service, by a file in the runtime folder."""
        return zones.ask_for_compaction(runtime_dir)

    def close(self) -> None:
        """Unwatch all."""
        for identity in list(self._pidfds):
            self.unwatch(identity)

    def _ended(self, identity: Identity) -> None:
        self.unwatch(identity)
        self._exited(identity)


class DryRun(Effects):
    """Watches, and only says whom it would have killed."""

    def kill(self, identity: Identity) -> str:
        """Nothing is sent."""
        return f"dry run: pid {identity.pid} would have been killed"

    def compact(self, runtime_dir: Path) -> str:
        """Nobody is asked."""
        return f"dry run: {runtime_dir / zones.REQUEST} would have been written"


def _release_memory(pidfd: int) -> None:
    try:
        procs.mrelease(pidfd)
    except ProbeError:
        pass  # before Linux 5.15, or not allowed: the exit frees the memory a little later
    finally:
        os.close(pidfd)
