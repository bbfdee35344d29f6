"""The listening socket where systemd does not make it: right from birth, never stolen.

Two daemons on one path would each believe in their own books, so the path is taken under a
lock, and only a socket that refuses connections is removed as stale.
"""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from umad.daemon.control import BACKLOG
from umad.errors import ConfigError

SOCKET_MODE = 0o660


class Listener:
    """A bound socket, its file where it has one, and the lock that makes it the only one there."""

    def __init__(
        self, sock: socket.socket, path: Path | None = None, lock: int | None = None
    ) -> None:
        self.socket = sock
        self._path = path
        self._lock = lock

    def close(self) -> None:
        """Stop listening and leave no file behind."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)


def adopt(fds: list[int]) -> socket.socket:
    """The socket that systemd passed.

    Raises:
        ConfigError: not exactly one, or not a listening Unix stream socket.
    """
    if len(fds) != 1:
        raise ConfigError(f"systemd passed {len(fds)} sockets, umad takes one (umad.socket)")
    sock = socket.socket(fileno=fds[0])
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise ConfigError("the socket that systemd passed is no Unix stream socket (umad.socket)")
    return sock


def bind(path: Path, gid: int | None) -> Listener:
    """Take the path and listen on it.

    1. another daemon holds the lock or answers on the socket: refuse;
    2. nothing there: bind;
    3. a socket that refuses connections: stale, remove it and bind;
    4. anything else (a file, no access, no answer): refuse and touch nothing.

    Raises:
        ConfigError: with what is in the way and what to do.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot use {path.parent} for the socket: {error.strerror}; run as root, or set "
            "daemon.socket to a path of yours"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"another umad is running on {path}; stop it first") from error  # 1
    try:
        _make_way(path)
        return Listener(_bound(path, gid), path, lock)
    except BaseException:
        os.close(lock)
        raise


def _make_way(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return  # 2
    except OSError as error:
        raise ConfigError(f"cannot look at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there and is no socket; move it away")  # 4
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # 3
            return
        except FileNotFoundError:
            return
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0, "no answer")
            raise ConfigError(
                f"cannot tell whether somebody serves {path} ({why}); look who owns it"  # 4
            ) from error
    raise ConfigError(f"another program serves {path}; stop it first")  # 1


def _bound(path: Path, gid: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from birth: between bind and chmod anybody could connect.
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        sock.bind(str(path))
        if gid is not None and os.getuid() == 0:
            os.chown(path, -1, gid)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return sock
