"""What the daemon does to the world: watch processes, kill them.

Owns the pidfds.  A signal goes through the pidfd that was opened when the worker registered, so
that a pid that was reused meanwhile is never hit.  ``DryRun`` stands in for ``Effects`` and
only tells what would have been done.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Protocol

from umad.errors import ProbeError
from umad.host import procs
from umad.values import Identity


class Doer(Protocol):
    """The seam that ``--dry-run`` swaps."""

    def watch(self, identity: Identity) -> None:
        """Report this process's end."""
        ...

    def unwatch(self, identity: Identity) -> None:
        """No more interest."""
        ...

    def kill(self, identity: Identity) -> str:
        """SIGKILL it; returns what went wrong, or nothing."""
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

    def watch(self, identity: Identity) -> None:
        """Open the pidfd; a process that has ended meanwhile is reported at once."""
        if identity in self._pidfds:
            return
        try:
            pidfd = procs.open_pidfd(identity)
        except ProbeError:
            self._loop.call_soon(self._exited, identity)
            return
        self._pidfds[identity] = pidfd
        self._loop.add_reader(pidfd, self._ended, identity)

    def unwatch(self, identity: Identity) -> None:
        """Close the pidfd."""
        pidfd = self._pidfds.pop(identity, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def kill(self, identity: Identity) -> str:
        """SIGKILL through the pidfd, then let the kernel take the memory back at once."""
        pidfd = self._pidfds.get(identity)
        if pidfd is None:
            return "it is not watched (any more)"
        if identity.pid in (0, 1, os.getpid(), os.getppid()):
            return "umad never kills itself, its parent or pid 1"
        try:
            if not procs.kill_via(pidfd, signal.SIGKILL):
                return ""
        except ProbeError as error:
            return error.message
        # Freeing gigabytes takes tens of milliseconds: in a thread, on a descriptor of its own,
        # since the watched one is closed as soon as the process is gone.
        self._loop.run_in_executor(None, _release_memory, os.dup(pidfd))
        return ""

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


def _release_memory(pidfd: int) -> None:
    try:
        procs.mrelease(pidfd)
    except ProbeError:
        pass  # before Linux 5.15, or not allowed: the exit frees the memory a little later
    finally:
        os.close(pidfd)
