"""Who is at the other end of a Unix socket, as the kernel says it.

Rules: a pid comes from the kernel, never from a message.  SO_PEERCRED names the process that
connected; SCM_CREDENTIALS names the one that sent these bytes, which differs after a fork.
Stays out: what a peer may do.
"""

import errno
import grp
import os
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any, Final

from umad.errors import AccessDenied, ProbeError
from umad.host.procs import comm, process_identity
from umad.values import Peer

_SO_PEERGROUPS: Final = 59  # Linux 4.13; Python has no name for it
_SO_PEERPIDFD: Final = 77  # Linux 6.5
_UCRED: Final = struct.Struct("=iII")
_GROUPS_BYTES_MAX: Final = 1024  # the most that Python's getsockopt takes: 256 groups


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected this socket.

    Raises:
        AccessDenied: its pid is not visible here, or it is gone already.
        ProbeError: the socket cannot tell.
    """
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError as error:
        raise ProbeError(f"cannot read the peer of the socket: {error.strerror}") from error
    pid, uid, gid = _UCRED.unpack(packed)
    if pid <= 0:
        raise AccessDenied(
            "the kernel shows pid 0 for this peer: it runs in a PID namespace that umad cannot "
            "see into. Start umad on the host, or the worker in umad's PID namespace "
            "(docker run --pid=host)"
        )
    pidfd = _peer_pidfd(sock)
    try:
        identity = process_identity(pid)
        if identity is None or (pidfd is not None and _has_ended(pidfd)):
            raise AccessDenied(f"process {pid} ended before it was known")
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return Peer(identity, uid, gid, _peer_groups(sock), comm(pid))


def _peer_pidfd(sock: socket.socket) -> int | None:
    """Pins the peer while its start time is read; None before Linux 6.5, where pids may race."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise AccessDenied("the peer ended before it was known") from error
        return None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _peer_groups(sock: socket.socket) -> frozenset[int]:
    """Supplementary groups; none where they cannot be told, which gives the fewest rights."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError:
        return frozenset()
    return frozenset(struct.unpack(f"={len(packed) // 4}I", packed))


def group_id(name: str) -> int | None:
    """The id of a group; None when this system has no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def enable_passcred(sock: socket.socket) -> None:
    """Ask for the sender's credentials with every message; set it before the first one is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def parse_creds(ancillary: Iterable[tuple[int, int, Any]]) -> int | None:
    """The pid of the process that sent a message, from ``recvmsg``'s ancillary data.

    Returns:
        The pid; None when the kernel named none (no SO_PASSCRED then, or another namespace).
    """
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            if len(data) < _UCRED.size:
                return None
            pid: int = _UCRED.unpack_from(data)[0]
            return pid or None
    return None
