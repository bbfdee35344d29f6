"""Messages between two processes of one engine: small ones as datagrams, large ones by memory.

Owns ``Channel``, one end of a private link of ``umad.wire`` over a SOCK_SEQPACKET pair.  A message
of ``PARCEL_BYTES`` or more is written into a memfd that is sealed and handed over (SCM_RIGHTS);
the other end maps it and decodes it from there, so an image never passes through the socket.
Rules: what arrives is held to the link's limits before it is decoded; a mapping that its sender
could still change is refused; the death of one end is the end of ``receive`` at the other.
Sending is thread-safe; one thread receives.
"""

import array
import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from umad.errors import LocalProtocolError, ModelFailed, RemoteProtocolError
from umad.wire.connection import Connection
from umad.wire.frames import Limits
from umad.wire.messages import Message

# Source: below this a copy through the socket is cheaper than a memfd and two mappings; and a
# datagram must fit the default send buffer (208 KiB) several times, so that a cancellation
# never waits behind a job.
PARCEL_BYTES: Final = 64 << 10
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_FDS_MAX: Final = 4  # one is right; room to close what is too many
_FDS_BYTES: Final = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)


class Channel:
    """One end of the link.

    Args:
        sock: an end of a SOCK_SEQPACKET pair; the channel owns it.
        role: "client" for the end that asks.
        limits: the same at both ends.
    """

    def __init__(
        self, sock: socket.socket, role: Literal["client", "server"], limits: Limits
    ) -> None:
        self._sock = sock
        self._connection = Connection(role, limits, handshake=False)
        self._limit = limits.message_bytes
        self._lock = threading.Lock()

    def request(self, method: str, params: Mapping[str, Any]) -> int:
        """Ask the other end; returns the id that its answer will carry.

        Raises:
            LocalProtocolError: it is too large, or nothing that MessagePack can carry.
        """
        with self._lock:
            ident, data = self._connection.send_request(method, params)
            self._send(data)
            return ident

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Tell the other end; nothing happens when it is gone."""
        # Closed by the receiving thread meanwhile: there is nobody to tell.
        with self._lock, contextlib.suppress(LocalProtocolError):
            self._send(self._connection.send_notification(method, params))

    def answer(
        self, ident: int, *, result: Any = None, error: Mapping[str, Any] | None = None
    ) -> None:
        """Answer a request, once; nothing happens when the other end is gone."""
        with self._lock:
            try:
                data = self._connection.send_response(ident, result=result, error=error)
            except LocalProtocolError as fault:
                refused = ModelFailed(f"the answer cannot travel: {fault.message}")
                data = self._connection.send_response(ident, error=refused.to_wire())
            self._send(data)

    def receive(self) -> list[Message] | None:
        """Wait for the other end; None once it is gone.

        Raises:
            RemoteProtocolError: it broke the protocol; the channel is closed.
        """
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                PARCEL_BYTES, _FDS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:  # reset: it died with bytes of ours unread
            return None
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        try:
            if not data:
                return None
            source = _mapped(fds, self._limit) if fds else contextlib.nullcontext(data)
            with source as whole, self._lock:
                return self._connection.feed(whole)
        except RemoteProtocolError:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """End the link from this end, in whatever thread; the other end sees it at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the socket itself; for the thread that receives, when it is done."""
        self.close()
        with self._lock:
            self._connection.close()
            self._sock.close()

    def _send(self, data: bytes) -> None:
        """Under the lock.  Failing to send is the end of the link: an answer would be missing."""
        try:
            if len(data) < PARCEL_BYTES:
                self._sock.send(data)
                return
            fd = _parcel(data)
            try:
                socket.send_fds(self._sock, [b"\0"], [fd])
            finally:
                os.close(fd)
        except OSError:  # the peer is gone, or there is no memory or descriptor for a parcel
            self.close()


def _parcel(data: bytes) -> int:
    """A sealed memfd that holds ``data``; the caller closes it."""
    fd = os.memfd_create("umad-parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _mapped(fds: "array.array[int]", limit: int) -> Iterator[memoryview]:
    """The bytes of a parcel, where they lie.

    Raises:
        RemoteProtocolError: it is not one sealed memfd within the limit.
    """
    try:
        size = os.fstat(fds[0]).st_size
        sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError as error:  # no memfd at all
        raise RemoteProtocolError(f"the peer sent no parcel: {error.strerror}") from error
    if len(fds) != 1 or not sealed or not 0 < size <= limit:
        raise RemoteProtocolError(
            f"the peer sent {len(fds)} parcels, the first of {size} bytes, sealed: {sealed}; one "
            f"of at most {limit} that is sealed may come"
        )
    with mmap.mmap(fds[0], size, prot=mmap.PROT_READ) as pages, memoryview(pages) as whole:
        yield whole
