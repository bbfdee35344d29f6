"""The control socket: connections, bytes, limits.

Owns the listening socket and one ``Channel`` a connection.  Bytes go through the wire's state
machine; whole messages go to the loop.  Rules: a peer that breaks the protocol, sends half a
message and falls silent, or does not read its answers loses its own connection and nothing
else happens.  Every read takes the sender's credentials with it, so that a forked child that
uses its parent's connection is noticed.
"""

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from umad.errors import (
    AccessDenied,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    UmadError,
)
from umad.host import peercred
from umad.values import Peer
from umad.wire.connection import Connection, State
from umad.wire.messages import Message, Notification, Request

READ_BYTES: Final = 64 * 1024
HELLO_WITHIN_S: Final = 5.0
MESSAGE_WITHIN_S: Final = 5.0
IDLE_MAX_S: Final = 600.0
SWEEP_EVERY_S: Final = 1.0
# An answer is at most 64 KiB; a peer that leaves this much unread is not reading.
UNREAD_BYTES_MAX: Final = 1 << 20
CONNECTIONS_PER_UID_MAX: Final = 128
BACKLOG: Final = 512
# struct ucred, and room for one descriptor: the kernel closes what does not fit.
_ANCILLARY_SPACE: Final = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4)


class Handler(Protocol):
    """Who is told of what happens on the socket (daemon/loop.py)."""

    def opened(self, channel: "Channel") -> None:
        """A peer has connected."""
        ...

    def request(self, channel: "Channel", message: Request) -> None:
        """A peer asks."""
        ...

    def notification(self, channel: "Channel", message: Notification) -> None:
        """A peer tells."""
        ...

    def closed(self, channel: "Channel", why: str) -> None:
        """The connection is over; ``why`` is empty when the peer just left."""
        ...

    def foreign(self, channel: "Channel", pid: int) -> None:
        """Another process than the one that connected has sent on this connection."""
        ...

    def idle_allowed(self, channel: "Channel") -> bool:
        """This connection may be silent for long."""
        ...


class Channel:
    """One connection.  ``id`` never comes back within a daemon's life."""

    def __init__(
        self,
        server: "ControlServer",
        sock: socket.socket,
        peer: Peer,
        key: int,
    ) -> None:
        self.id = key
        self.peer = peer
        self.connection = Connection("server")
        self._server = server
        self._sock = sock
        self._out = bytearray()
        self._held: bytearray | None = None  # answers to messages that came at once: sent at once
        self._fd: int | None = None
        self._foreign: set[int] = set()
        self._last_s = self._partial_since_s = server.loop.time()
        self._closed = False
        server.loop.add_reader(sock, self._readable)

    def respond(
        self,
        request: int,
        result: Any = None,
        error: Mapping[str, Any] | None = None,
        fd: int | None = None,
    ) -> None:
        """Answer a request, with a file descriptor; nothing happens on a closed connection.

        An answer that no message holds is an error of its asker's, not the end of the daemon.
        """
        if self._closed:
            return
        try:
            data = self.connection.send_response(request, result=result, error=error)
        except LocalProtocolError as problem:
            refused = Overloaded(f"the answer does not fit into a message: {problem.message}")
            data = self.connection.send_response(request, error=refused.to_wire())
        self._send(data, fd)

    def take_fd(self) -> int | None:
        """The file descriptor that the peer sent last; the caller closes it."""
        fd, self._fd = self._fd, None
        return fd

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Tell the peer something, if it has said hello; what no message holds is not told."""
        if not self._closed and self.connection.state is State.READY:
            with contextlib.suppress(LocalProtocolError):
                self._send(self.connection.send_notification(method, params))

    def close(self, why: str = "") -> None:
        """End the connection, whatever state it is in."""
        if self._closed:
            return
        self._closed = True
        self._server.loop.remove_reader(self._sock)
        self._server.loop.remove_writer(self._sock)
        self.connection.close()
        self._sock.close()
        if (fd := self.take_fd()) is not None:
            os.close(fd)
        self._server.forget(self)
        self._server.handler.closed(self, why)

    def overdue(self, now_s: float) -> str:
        """Why this connection must end for being slow or silent, or nothing."""
        silent_s = now_s - self._last_s
        if self.connection.state is not State.READY and silent_s > HELLO_WITHIN_S:
            return "no hello within 5 s"
        if self.connection.has_partial and now_s - self._partial_since_s > MESSAGE_WITHIN_S:
            return "half a message, and nothing more within 5 s"
        if silent_s > IDLE_MAX_S and not self._server.handler.idle_allowed(self):
            return "idle for 10 min without a worker"
        return ""

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                READ_BYTES, _ANCILLARY_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it died with our answers unread: no fault of its own making
            self.close()
            return
        if not data:
            self.close("half a message, then the end" if self.connection.has_partial else "")
            return
        if len(ancillary) > 1:
            self._keep_fd(ancillary)
        pid = peercred.parse_creds(ancillary)
        if pid is not None and pid != self.peer.identity.pid and pid not in self._foreign:
            self._foreign.add(pid)
            self._server.handler.foreign(self, pid)
        partial_before = self.connection.has_partial
        try:
            messages = self.connection.feed(data)
        except RemoteProtocolError as error:
            self.close(error.message)
            return
        self._last_s = self._server.loop.time()
        if messages or not partial_before:
            self._partial_since_s = self._last_s
        self._hand_on(messages)

    def _hand_on(self, messages: list[Message]) -> None:
        """To the loop; what is sent to the peer meanwhile leaves in one piece."""
        if len(messages) > 1:
            self._held = bytearray()
        for message in messages:
            if self._closed:
                return
            if type(message) is Request:
                self._server.handler.request(self, message)
            elif type(message) is Notification:
                self._server.handler.notification(self, message)
        self._let_go()

    def _keep_fd(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Keep the last descriptor a peer sent; any other is closed at once."""
        for level, kind, data in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            for fd in struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4]):
                if self._fd is not None:
                    os.close(self._fd)
                self._fd = fd

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held:
            self._send(bytes(held))

    def _send(self, data: bytes, fd: int | None = None) -> None:
        if self._held is not None:
            if fd is None and len(self._held) + len(data) <= READ_BYTES:
                self._held += data
                return
            self._let_go()
        if self._out and fd is None:
            self._out += data
            if len(self._out) > UNREAD_BYTES_MAX:
                self.close("it does not read its answers")
            return
        try:
            if fd is None:
                sent = self._sock.send(data)
            else:
                # With its answer or not at all: a peer that reads so slowly asks again.
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", fd))
                sent = self._sock.sendmsg([self._out + data], [rights]) - len(self._out)
                if sent < 0:
                    raise OSError("half an answer was still on its way")
                self._out.clear()
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            # It is gone.  Closing here would pull the connection away under whoever iterates.
            self._server.loop.call_soon(self.close)
            return
        if sent < len(data):
            self._out += data[sent:]
            self._server.loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        del self._out[:sent]
        if not self._out:
            self._server.loop.remove_writer(self._sock)


class ControlServer:
    """Accepts peers on an already listening socket, within the limits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        handler: Handler,
        *,
        connections_max: int,
        trusted_uids: frozenset[int],
        refused: Callable[[str], None],
    ) -> None:
        self.loop = loop
        self.handler = handler
        self.channels: dict[int, Channel] = {}
        self._listener = listener
        self._connections_max = connections_max
        self._trusted_uids = trusted_uids
        self._refused = refused
        self._of_uid: Counter[int] = Counter()
        self._next = 1
        listener.setblocking(False)
        loop.add_reader(listener, self._acceptable)
        self._sweep_timer = loop.call_later(SWEEP_EVERY_S, self._sweep)

    def close(self) -> None:
        """Stop accepting and end all connections; the socket file is the caller's."""
        self._sweep_timer.cancel()
        self.loop.remove_reader(self._listener)
        for channel in list(self.channels.values()):
            channel.close()

    def forget(self, channel: Channel) -> None:
        """A channel has closed."""
        del self.channels[channel.id]
        self._of_uid[channel.peer.uid] -= 1

    def _acceptable(self) -> None:
        # A few at a time: a crowd at the door must not keep the loop from its tick.
        for _ in range(16):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause_accepting()
                self._refused(f"accept failed: {error.strerror}")
                return
            self._admit(sock)

    def _pause_accepting(self) -> None:
        """Out of descriptors: the listener stays readable, so leave it alone for a while."""
        self.loop.remove_reader(self._listener)
        self.loop.call_later(SWEEP_EVERY_S, self.loop.add_reader, self._listener, self._acceptable)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            peer = peercred.peer_of(sock)
            peercred.enable_passcred(sock)
        except UmadError as error:
            self._turn_away(sock, error)
            return
        if len(self.channels) >= self._connections_max:
            self._turn_away(sock, AccessDenied("too many connections; close some and retry"))
        elif (
            peer.uid not in self._trusted_uids and self._of_uid[peer.uid] >= CONNECTIONS_PER_UID_MAX
        ):
            self._turn_away(sock, AccessDenied(f"uid {peer.uid} has too many connections"))
        else:
            channel = Channel(self, sock, peer, self._next)
            self._next += 1
            self.channels[channel.id] = channel
            self._of_uid[peer.uid] += 1
            self.handler.opened(channel)

    def _turn_away(self, sock: socket.socket, error: UmadError) -> None:
        self._refused(error.message)
        sock.close()

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for channel in list(self.channels.values()):
            if why := channel.overdue(now_s):
                channel.close(why)
        self._sweep_timer = self.loop.call_later(SWEEP_EVERY_S, self._sweep)
