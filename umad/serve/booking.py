"""A process's own entry in the daemon's books, kept without a thread.

Owns ``Booking``: one worker over one connection, for a process that must stay single-threaded
because it forks (``umad.client`` has a listener thread).  Blocking, each call with a deadline.
"""

import contextlib
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeVar

from umad.client.dial import dial
from umad.client.memory import give_back, process_bytes
from umad.errors import DaemonLost, DaemonTimeout, RemoteProtocolError, UmadError, from_wire
from umad.wire.connection import Connection
from umad.wire.messages import PROTOCOL_VERSION, Response

T = TypeVar("T")
TIMEOUT_S: Final = 5.0
WAIT_S: Final = 5.0  # how long to queue for room
_RECV_BYTES: Final = 16 << 10


class Booking:
    """A worker named ``name`` with a quota, for all of this process's life.

    Args:
        path: the daemon's socket.
        name: the worker's.
        quota: its bytes.
    """

    def __init__(self, path: str, name: str, quota: int) -> None:
        self._path = path
        self._name = name
        self._quota = quota
        self._held: int | None = None
        self._baseline = self._worker = 0
        self._sock: socket.socket | None = None
        self._wire = Connection("client")

    @property
    def connected(self) -> bool:
        """The daemon has this process in its books."""
        return self._sock is not None

    def fileno(self) -> int:
        """The connection's; to be watched for ``drain``."""
        assert self._sock is not None
        return self._sock.fileno()

    def load(self, build: Callable[[], T]) -> T:
        """Register, have ``build`` take its bytes within what was booked, and commit them.

        Raises:
            DaemonUnavailable: no daemon.
            RequestRejected: it refused; its child says why.
        """
        self._connect()
        lease = self._call("reserve", worker=self._worker, bytes=self._quota, wait_s=WAIT_S)
        before = process_bytes()
        built = build()
        give_back()
        self._held = max(0, process_bytes() - before)
        self._call("commit", lease=lease["lease"], token=lease["token"], measured=self._held)
        return built

    def drain(self) -> bool:
        """Read what the daemon says, without waiting; False when the connection has ended.

        There is nothing to do about a ``revoke``: what is held cannot be given back.
        """
        assert self._sock is not None
        try:
            self._sock.setblocking(False)
            data = self._sock.recv(_RECV_BYTES)
            self._wire.feed(data)
        except BlockingIOError:
            return True
        except (OSError, RemoteProtocolError):
            return False
        return bool(data)

    def reconnect(self) -> bool:
        """Register again with what is held; False when the daemon is not there or refuses."""
        with contextlib.suppress(UmadError):
            self._connect()
            return True
        self.disconnect()
        return False

    def disconnect(self) -> None:
        """Let go of the connection; the daemon keeps the books for a moment."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> None:
        self._sock = dial(self._path, TIMEOUT_S)
        self._wire = Connection("client")
        self._call("hello", versions=[PROTOCOL_VERSION], client=f"umad-{self._name}")
        held = {} if self._held is None else {"held": self._held, "baseline": self._baseline}
        own = {"model": self._name, "quota": self._quota, "pin": True}
        answer = self._call("register", **own, **held)
        self._worker, self._baseline = answer["worker"], answer["baseline"]

    def _call(self, method: str, **params: Any) -> Any:
        """Ask and wait for the answer.

        Raises:
            DaemonLost: the connection ended.
            DaemonTimeout: no answer in time.
            UmadError: the daemon refused.
        """
        assert self._sock is not None
        deadline_s = monotonic() + TIMEOUT_S + params.get("wait_s", 0)
        ident, data = self._wire.send_request(method, params)
        try:
            self._sock.sendall(data)
            while True:
                self._sock.settimeout(max(0.001, deadline_s - monotonic()))
                received = self._sock.recv(_RECV_BYTES)
                if not received:
                    raise DaemonLost("the daemon closed the connection")
                for message in self._wire.feed(received):
                    if isinstance(message, Response) and message.id == ident:
                        if message.error is not None:
                            raise from_wire(message.error)
                        return message.result
        except TimeoutError as error:
            raise DaemonTimeout(f"the umad daemon did not answer {method} in time") from error
        except OSError as error:
            raise DaemonLost(f"the connection to the umad daemon was lost: {error}") from error
