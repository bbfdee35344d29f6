"""One live socket to the daemon, shared by many threads.

Owns sending, reading and the matching of answers to callers.  There is no reader thread between
a caller and its answer, because its wake-up would double the round trip: a calling thread reads
the socket itself (the *leader*) and hands other callers (*followers*) what it read for them;
when it has its own answer it passes the lead on.  While no call is under way the client's
listener waits on an epoll for the socket; a call disarms it, so that an answer wakes one thread.

Locks: ``_lock`` guards the protocol machine, the waiters and sending, and is never held while
waiting, but for the rest of a message that went out in part; ``_reading`` makes the leader.
"""

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from umad.errors import (
    DaemonLost,
    DaemonTimeout,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    UnknownMethod,
    from_wire,
)
from umad.wire.connection import Connection
from umad.wire.messages import Notification, Request, Response

_RECV_BYTES: Final = 16 * 1024
_FD_SPACE: Final = socket.CMSG_SPACE(4)  # one descriptor: the kernel closes what does not fit
_CLOEXEC: Final = socket.MSG_CMSG_CLOEXEC
_REST_S: Final = 1.0  # for the rest of a message whose beginning is in the socket
_ARMED: Final = select.EPOLLIN | select.EPOLLONESHOT
_DISARMED: Final = select.EPOLLONESHOT  # a hang-up is still told, once

_Answer = Response | DaemonLost | None  # None: lead now


class Link:
    """A connection over which ``hello`` has not been said yet.

    Args:
        sock: connected; the link owns it.
        epoll: the listener's; the link registers its socket there.
        on_notification: called by the thread that read one; must be quick and not call back.
        on_late: told the method, parameters and result of an answer that nobody waits for.
        on_lost: called once when the link ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        epoll: select.epoll,
        on_notification: Callable[["Link", Notification], None],
        on_late: Callable[["Link", str, Mapping[str, Any], Any], None],
        on_lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._epoll = epoll
        self._on_notification = on_notification
        self._on_late = on_late
        self._on_lost = on_lost
        self._connection = Connection("client")
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._waiters: dict[int, SimpleQueue[_Answer]] = {}
        self._late: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._fd_received: int | None = None
        self._lost: DaemonLost | None = None
        self.generation = 0  # written by the client after hello
        epoll.register(self._fd, _ARMED)

    @property
    def alive(self) -> bool:
        """False once the connection has ended."""
        return self._lost is None

    def take_fd(self) -> int | None:
        """The file descriptor that came with an answer last; the caller closes it."""
        with self._lock:
            fd, self._fd_received = self._fd_received, None
        return fd

    def call(
        self, method: str, params: Mapping[str, Any], deadline_s: float, fd: int | None = None
    ) -> Any:
        """Send a request and wait for its answer.

        Args:
            method: a request of PROTOCOL.md.
            params: its parameters.
            deadline_s: monotonic time after which nobody waits any more.
            fd: a file descriptor to send along; stays the caller's.

        Raises:
            DaemonTimeout: no answer in time.
            DaemonLost: the connection ended before the answer came.
            RequestRejected: the daemon refused.
        """
        waiter: SimpleQueue[_Answer] = SimpleQueue()
        request_id = self._ask(method, params, waiter, deadline_s, fd)
        try:
            answer = self._await(waiter, deadline_s)
        finally:
            with self._lock:
                if self._waiters.pop(request_id, None) is not None:
                    # Given up (deadline, Ctrl-C): the daemon may still grant it, and the lead
                    # may have been offered to us.
                    self._late[request_id] = (method, params)
                    self._offer_lead()
        if answer is None:
            with contextlib.suppress(Empty):  # it came while we were giving up
                answer = waiter.get_nowait() or waiter.get_nowait()
        if answer is None:
            raise DaemonTimeout(f"the umad daemon did not answer {method} in time")
        if isinstance(answer, DaemonLost):
            raise DaemonLost(answer.message) from answer
        if answer.error is not None:
            raise from_wire(answer.error)
        return answer.result

    def notify(self, method: str, params: Mapping[str, Any]) -> bool:
        """Send a notification without waiting.

        Returns:
            False when it was dropped: the connection is lost, or the daemon reads so slowly that
            the socket is full, and then inference matters more than a report.
        """
        with self._lock:
            if self._lost is not None:
                return False
            return self._send(self._connection.send_notification(method, params))

    def pump(self) -> None:
        """Read what is there, without waiting; for the listener."""
        if self._reading.acquire(blocking=False):
            try:
                if self._lost is None:
                    self._receive()
            finally:
                self._hand_over()

    def lose(self, why: str) -> None:
        """End the connection: every caller that waits gets ``DaemonLost``."""
        with self._lock:
            if self._lost is not None:
                return
            self._lose_locked(why)

    def _lose_locked(self, why: str) -> None:
        lost = self._lost = DaemonLost(f"the connection to the umad daemon was lost: {why}")
        self._connection.close()
        self._late.clear()
        for waiter in self._waiters.values():
            waiter.put(lost)
        self._waiters.clear()
        with contextlib.suppress(OSError):  # it may be gone already
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that polls it
        self._on_lost()

    def dispose(self) -> None:
        """Close the socket of a lost link; waits until its leader has left the poll."""
        self.lose("closed")
        with self._reading, self._lock:
            with contextlib.suppress(OSError):  # disposed of before
                self._epoll.unregister(self._fd)  # a copy in a child would keep it registered
            self._sock.close()
            if self._fd_received is not None:
                os.close(self._fd_received)
                self._fd_received = None

    def abandon(self) -> None:
        """In a forked child: let go of the parent's socket without a byte or a shutdown."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._lost = DaemonLost("this connection belongs to the parent process")
        self._sock.close()

    def _ask(
        self,
        method: str,
        params: Mapping[str, Any],
        waiter: "SimpleQueue[_Answer]",
        deadline_s: float,
        fd: int | None,
    ) -> int:
        with self._lock:
            if self._lost is not None:
                raise DaemonLost(self._lost.message)
            limit = self._connection.limits.open_requests
            if self._connection.open_requests >= limit:
                raise Overloaded(f"{limit} calls to the umad daemon wait already")
            request_id, data = self._connection.send_request(method, params)
            if not self._waiters:
                self._arm(_DISARMED)
            self._waiters[request_id] = waiter
            if self._send(data, fd):
                return request_id
        # The socket is full.  Wait outside the lock, so that reports need not wait with us.
        while self._wait_writable(deadline_s):
            with self._lock:
                if self._lost is not None or self._send(data, fd):
                    return request_id
        # An id of the protocol machine hangs on a request that was never sent: start anew.
        why = f"it took no bytes in time for {method}"
        self.lose(why)
        raise DaemonTimeout(f"the umad daemon did not answer {method}: {why}")

    def _send(self, data: bytes, fd: int | None = None) -> bool:
        """Under ``_lock``: all of ``data`` or, when the socket is full, none of it."""
        try:
            if fd is None:
                sent = self._sock.send(data)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", fd))
                sent = self._sock.sendmsg([data], [rights])
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose_locked(str(error))
            return True  # the waiter has its answer: lost
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])
        return True

    def _send_rest(self, rest: memoryview) -> None:
        deadline_s = monotonic() + _REST_S
        while rest:
            if not self._wait_writable(deadline_s):
                self._lose_locked("it stopped reading in the middle of a message")
                return
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose_locked(str(error))
                return

    def _wait_writable(self, deadline_s: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return bool(poller.poll(_milliseconds(deadline_s)))

    def _await(self, waiter: "SimpleQueue[_Answer]", deadline_s: float) -> _Answer:
        """The answer, or None at the deadline."""
        while True:
            if self._reading.acquire(blocking=False):
                try:
                    return self._lead(waiter, deadline_s)
                finally:
                    self._hand_over()
            try:
                answer = waiter.get(timeout=max(deadline_s - monotonic(), 0))
            except Empty:
                return None
            if answer is not None:
                return answer

    def _lead(self, waiter: "SimpleQueue[_Answer]", deadline_s: float) -> _Answer:
        while True:
            if not waiter.empty():  # nobody else takes from it
                answer = waiter.get_nowait()
                if answer is not None:
                    return answer
                continue
            if not self._readable.poll(_milliseconds(deadline_s)):
                return None
            self._receive()

    def _hand_over(self) -> None:
        # Release first, look second: a caller that came between found the lead free.
        self._reading.release()
        with self._lock:
            self._offer_lead()

    def _offer_lead(self) -> None:
        """Under ``_lock``: somebody must read.  One offer too many does no harm."""
        for waiter in self._waiters.values():
            waiter.put(None)
            return
        self._arm(_ARMED)

    def _arm(self, events: int) -> None:
        if self._lost is None:
            self._epoll.modify(self._fd, events)

    def _receive(self) -> None:
        """Holding ``_reading``: read once and hand out what it completes."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_RECV_BYTES, _FD_SPACE, _CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(str(error))
            return
        if not data:
            self.lose("it closed the connection")
            return
        with self._lock:
            if ancillary:
                self._keep_fd(ancillary)
            if self._lost is not None:
                return
            try:
                messages = self._connection.feed(data)
            except RemoteProtocolError as error:
                self._lose_locked(error.message)
                return
            others = [message for message in messages if not self._answered(message)]
        for message in others:
            self._handle(message)

    def _keep_fd(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Under ``_lock``: an account page; an older one that nobody took is closed."""
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= 4:
                if self._fd_received is not None:
                    os.close(self._fd_received)
                (self._fd_received,) = struct.unpack_from("=i", data)

    def _answered(self, message: object) -> bool:
        if isinstance(message, Response):
            waiter = self._waiters.pop(message.id, None)
            if waiter is not None:
                waiter.put(message)
                return True
        return False

    def _handle(self, message: object) -> None:
        if isinstance(message, Notification):
            self._on_notification(self, message)
        elif isinstance(message, Response):
            with self._lock:
                method, params = self._late.pop(message.id, ("", {}))
            if message.error is None:
                self._on_late(self, method, params, message.result)
        elif isinstance(message, Request):
            self._refuse(message)

    def _refuse(self, request: Request) -> None:
        """The daemon asks nothing of clients in this version; say so, as the protocol wants."""
        error = UnknownMethod(f"this client answers no {request.method}").to_wire()
        with self._lock, contextlib.suppress(LocalProtocolError):  # lost meanwhile
            self._send(self._connection.send_response(request.id, error=error))


def _milliseconds(deadline_s: float) -> int:
    """For poll(): rounded up, so that a wait never ends before its deadline."""
    return max(int((deadline_s - monotonic()) * 1000) + 1, 0)
