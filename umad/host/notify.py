"""Talks to systemd: readiness, status, watchdog pings, and descriptors kept and handed over.

Rules: without systemd every call does nothing; the variables are taken out of the environment,
so that no child answers for the daemon; nothing here blocks.
Source: sd_notify(3), sd_listen_fds(3), "File Descriptor Store" of systemd's documentation.
Stays out: when to ping (after a finished tick of the loop, and only then).

Why not the sdnotify package (0.3.2): it blocks when systemd's queue is full, leaks its socket
when nobody listens, drops every text that is not Latin-1, and swallows all exceptions.
"""

import os
import socket
from array import array
from collections.abc import MutableMapping
from typing import Final, NamedTuple

_LISTEN_FDS_START: Final = 3
_LISTEN_FDS_MAX: Final = 4096


class Notifier:
    """The notification socket of the service manager.

    Args:
        environ: the environment; NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are removed.

    Attributes:
        watchdog_period_s: seconds from ping to ping, half of what systemd allows; None when it
            watches nobody, or another process.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        # "@name" is an abstract address, whose first byte is zero.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.watchdog_period_s = _watchdog_period_s(
            environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        )
        if self._socket is None:
            self.watchdog_period_s = None

    def ready(self, status: str = "") -> bool:
        """The start is finished.

        Returns:
            False when systemd is there and has not taken it: say it again, it waits for this.
        """
        return self._send(f"READY=1\nSTATUS={_line(status)}" if status else "READY=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send(f"STATUS={_line(text)}")

    def watchdog(self) -> None:
        """Still alive; nothing where systemd does not watch us."""
        if self.watchdog_period_s is not None:
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def store_fd(self, name: str, fd: int) -> bool:
        """Have systemd keep a copy of a descriptor and hand it to the next start by this name.

        A descriptor that it has already is not kept twice.  ``name`` has at most 255 printable
        ASCII characters and no colon.

        Returns:
            False when systemd is there and has not taken it: say it again.
        """
        # Not watched: what can hang up would be dropped from the store at that moment.
        return self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def remove_fd(self, name: str) -> bool:
        """Have systemd close what it keeps by this name; the result is that of ``store_fd``."""
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, *fds: int) -> bool:
        if self._socket is None:
            return True
        try:
            # Not socket.send_fds: up to Python 3.12 it forgets the address.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
            ancillary = [rights] if fds else []
            self._socket.sendmsg([state.encode()], ancillary, 0, self._address)
        except OSError:  # its queue is full, or it is gone; the next ping says as much
            return False
        return True


def _watchdog_period_s(usec: str, pid: str) -> float | None:
    if pid and pid != str(os.getpid()):
        return None
    if not (usec.isascii() and usec.isdigit()) or int(usec) == 0:
        return None
    return int(usec) / 2 / 1_000_000


def _line(text: str) -> str:
    """Without line ends, which would begin another assignment."""
    return " ".join(text.split())


class PassedFd(NamedTuple):
    """A descriptor that systemd handed over: a socket's unit, or the name it was stored by."""

    name: str
    fd: int


def listen_fds(environ: MutableMapping[str, str] = os.environ) -> list[PassedFd]:
    """What systemd opened or kept for this process; empty without it.

    The descriptors are set close-on-exec and LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES removed.
    """
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return []
    fds = range(_LISTEN_FDS_START, _LISTEN_FDS_START + min(int(count), _LISTEN_FDS_MAX))
    for fd in fds:
        os.set_inheritable(fd, False)
    names += [""] * (len(fds) - len(names))
    return [PassedFd(name, fd) for name, fd in zip(names, fds, strict=False)]
