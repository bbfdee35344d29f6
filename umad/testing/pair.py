"""A client and a server connection joined in memory, without a socket."""

from umad.wire.connection import Connection
from umad.wire.frames import Limits
from umad.wire.messages import Message


class MemoryPair:
    """Two ``Connection``s and the bytes on their way between them.

    Args:
        limits: the caps of both; the protocol's where None.
        handshake: as for ``Connection``.

    Put what a ``send_*`` method of ``client`` returned into ``to_server``, of ``server`` into
    ``to_client``; ``pump`` delivers it.
    """

    def __init__(self, limits: Limits | None = None, *, handshake: bool = True) -> None:
        self.client = Connection("client", limits, handshake=handshake)
        self.server = Connection("server", limits, handshake=handshake)
        self.to_server = bytearray()
        self.to_client = bytearray()

    def pump(self, chunk_bytes: int = 0) -> tuple[list[Message], list[Message]]:
        """Deliver what is on the way, in pieces of ``chunk_bytes`` (0: all at once).

        Returns:
            The messages that reached the server, and those that reached the client.

        Raises:
            RemoteProtocolError: one side broke the protocol.
        """
        return (
            _deliver(self.to_server, self.server, chunk_bytes),
            _deliver(self.to_client, self.client, chunk_bytes),
        )


def _deliver(pipe: bytearray, receiver: Connection, chunk_bytes: int) -> list[Message]:
    data = bytes(pipe)
    pipe.clear()
    step = chunk_bytes or len(data) or 1
    found: list[Message] = []
    for start in range(0, len(data), step):
        found.extend(receiver.feed(data[start : start + step]))
    return found
