"""Opening the daemon's socket, and saying what to do where that fails."""

import contextlib
import errno
import grp
import socket
from pathlib import Path

from umad.errors import AccessDenied, DaemonUnavailable


def not_running(path: str) -> str:
    """What to tell a person when no daemon answers."""
    return (
        f"no umad daemon answers at {path}; start it with `systemctl start umad`, "
        "or `umad up` in a terminal"
    )


def dial(path: str, timeout_s: float) -> socket.socket:
    """Connect within ``timeout_s`` seconds.

    Raises:
        DaemonUnavailable: nobody listens there.
        AccessDenied: this user may not use the socket.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EACCES, errno.EPERM):
            raise AccessDenied(
                f"you may not use {path}; join the group {_group(path)!r}: "
                f"`sudo usermod -aG {_group(path)} $USER`, then log in again"
            ) from error
        raise DaemonUnavailable(f"{not_running(path)} ({error.strerror or error})") from error
    return sock


def _group(path: str) -> str:
    """Whose members may use the socket; "umad" where that cannot be seen."""
    with contextlib.suppress(OSError, KeyError):
        return grp.getgrgid(Path(path).stat().st_gid).gr_name
    return "umad"
