"""One connection as a state machine, the same for both sides.

Owns the order of things: ``hello`` before anything else, ids, open requests and their number.
Bytes in, messages out, and the other way round; no socket, no clock, no thread.
What the other side may not do raises ``RemoteProtocolError`` and closes the machine; what we may
not do raises ``LocalProtocolError`` and changes nothing.
Not thread-safe: the caller holds a lock around it, or one thread owns it.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal

from umad.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from umad.wire.frames import FrameDecoder, FrameEncoder, Limits
from umad.wire.messages import ID_MAX, Message, Notification, Request, Response, from_frame

HELLO: Final = "hello"


class State(Enum):
    """Where a connection is in its life."""

    NEW = "new"
    GREETING = "greeting"  # hello is under way
    READY = "ready"
    CLOSED = "closed"


class _Event(Enum):
    HELLO = "hello"
    ACCEPT = "an accepted hello"
    REJECT = "a refused hello"
    TRAFFIC = "a message other than hello"


# What is not in here is illegal.  READY needs no row for TRAFFIC: it is the hot path and is
# asked for first.  Closing is allowed everywhere.
_TRANSITIONS: Final[Mapping[tuple[State, _Event], State]] = {
    (State.NEW, _Event.HELLO): State.GREETING,
    (State.GREETING, _Event.ACCEPT): State.READY,
    (State.GREETING, _Event.REJECT): State.NEW,
}


class Connection:
    """The protocol between one client and one server, seen from one side.

    Args:
        role: which side this is.
        limits: the caps, the same for both directions.
        handshake: False for a private link, which starts READY and knows no hello.
    """

    def __init__(
        self,
        role: Literal["client", "server"],
        limits: Limits | None = None,
        *,
        handshake: bool = True,
    ) -> None:
        self.role = role
        self.limits = limits or Limits()
        self._handshake = handshake
        self._state = State.NEW if handshake else State.READY
        self._decoder = FrameDecoder(self.limits)
        self._encode = FrameEncoder(self.limits).encode
        self._asked: set[int] = set()  # our requests without an answer
        self._owed: set[int] = set()  # the peer's requests without an answer
        self._next_id = 0
        self._hello_id: int | None = None

    @property
    def state(self) -> State:
        """NEW until hello is under way, READY once it is answered."""
        return self._state

    @property
    def has_partial(self) -> bool:
        """Half a message has arrived; the caller's read deadline runs."""
        return self._decoder.has_partial

    @property
    def open_requests(self) -> int:
        """How many requests of this side wait for an answer."""
        return len(self._asked)

    def feed(self, data: bytes | memoryview) -> list[Message]:
        """Take bytes from the peer.

        Returns:
            The messages they complete, in order.

        Raises:
            RemoteProtocolError: the peer broke the protocol; the connection is CLOSED.
            LocalProtocolError: it was CLOSED before.
        """
        if self._state is State.CLOSED:
            raise LocalProtocolError("bytes were fed to a closed connection")
        try:
            messages = [from_frame(frame) for frame in self._decoder.feed(data)]
            for message in messages:
                self._receive(message)
        except RemoteProtocolError:
            self.close()
            raise
        return messages

    def send_request(self, method: str, params: Mapping[str, Any]) -> tuple[int, bytes]:
        """Ask the peer.

        Returns:
            The id its answer will carry, and the bytes to send.

        Raises:
            LocalProtocolError: not allowed now, too many requests are open, or not encodable.
        """
        greeting = self._handshake and method == HELLO
        if greeting and self.role == "server":
            raise LocalProtocolError("only a client says hello")
        after = self._after(_Event.HELLO if greeting else _Event.TRAFFIC, LocalProtocolError)
        if len(self._asked) >= self.limits.open_requests:
            raise LocalProtocolError(
                f"{len(self._asked)} requests wait for an answer, the protocol's limit"
            )
        request_id = self._next_id
        while request_id in self._asked:
            request_id = (request_id + 1) & ID_MAX
        data = self._encode([0, request_id, method, [params]])
        self._next_id = (request_id + 1) & ID_MAX
        self._asked.add(request_id)
        if greeting:
            self._hello_id = request_id
        self._state = after
        return request_id, data

    def send_response(
        self,
        request_id: int,
        *,
        result: Any = None,
        error: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Answer a request of the peer, once.

        Returns:
            The bytes to send.

        Raises:
            LocalProtocolError: no such request is open, both result and error are given, or
                the answer is not encodable (then the request stays open).
        """
        if request_id not in self._owed:
            raise LocalProtocolError(f"no request {request_id} waits for an answer")
        if error is not None and result is not None:
            raise LocalProtocolError("an answer holds a result or an error, not both")
        data = self._encode([1, request_id, error, result])
        if request_id == self._hello_id:
            self._settle_hello(error)
        self._owed.discard(request_id)
        return data

    def send_notification(self, method: str, params: Mapping[str, Any]) -> bytes:
        """Tell the peer something; returns the bytes to send.

        Raises:
            LocalProtocolError: not allowed now, or not encodable.
        """
        if self._state is not State.READY:
            self._after(_Event.TRAFFIC, LocalProtocolError)
        return self._encode([2, method, [params]])

    def close(self) -> None:
        """End it; open requests will never be answered.  Doing it again changes nothing."""
        self._state = State.CLOSED
        self._asked.clear()
        self._owed.clear()

    def _receive(self, message: Message) -> None:
        if type(message) is Request:
            self._receive_request(message)
        elif type(message) is Response:
            if message.id not in self._asked:
                raise RemoteProtocolError(f"the peer answered {message.id}, which nobody asked")
            self._asked.discard(message.id)
            if message.id == self._hello_id:
                self._settle_hello(message.error)
        elif type(message) is Notification and self._state is not State.READY:
            self._after(_Event.TRAFFIC, RemoteProtocolError)

    def _receive_request(self, request: Request) -> None:
        if self._handshake and request.method == HELLO:
            if self.role == "client":
                raise RemoteProtocolError("the server said hello; only a client does")
            self._state = self._after(_Event.HELLO, RemoteProtocolError)
            self._hello_id = request.id
        elif self._state is not State.READY:
            self._after(_Event.TRAFFIC, RemoteProtocolError)
        owed = self._owed
        if request.id in owed:
            raise RemoteProtocolError(f"the peer used id {request.id} for two open requests")
        if len(owed) >= self.limits.open_requests:
            raise RemoteProtocolError(
                f"the peer has more than {self.limits.open_requests} requests open"
            )
        owed.add(request.id)

    def _settle_hello(self, error: Mapping[str, Any] | None) -> None:
        self._hello_id = None
        event = _Event.ACCEPT if error is None else _Event.REJECT
        self._state = self._after(event, LocalProtocolError)

    def _after(self, event: _Event, fault: type[ProtocolError]) -> State:
        """The state after an event, or the fault where the table has none."""
        if self._state is State.READY and event is _Event.TRAFFIC:
            return State.READY
        after = _TRANSITIONS.get((self._state, event))
        if after is None:
            raise fault(f"{event.value} is not allowed while the connection is {self._state.value}")
        return after
