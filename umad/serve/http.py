"""The HTTP server: uvicorn, told how, and what it does to a client that takes nothing.

Rules: what is not taken yet of an answer is held within the transport's bounds (64 KiB) and the
answer's maker waits; a client that takes next to nothing of that for ``STALL_S`` loses its
connection, and its request ends as if it had hung up.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

STALL_S: Final = 30.0
TICK_S: Final = 1
CONNECTIONS_MAX: Final = 2000  # the last resort, below common limits of open files
DRAIN_S: Final = 5  # what is in work may still finish within this after SIGTERM


class ImpatientProtocol(H11Protocol):
    """A connection of uvicorn's that does not wait for ever for its client to read."""

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the transport at its start."""
        # asyncio does so only for sockets that were made with the protocol's number, and not for
        # those of socket.create_server().  An answer is a head and a body: its second part would
        # wait for the client's acknowledgement of the first, which comes after 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Called by the transport when it holds too much."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by the transport when it holds little."""
        self._patient()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport at its end."""
        self._patient()
        super().connection_lost(exc)

    def _patient(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def make_server(
    app: ASGIApp, on_tick: Callable[[], Awaitable[None]] | None = None
) -> uvicorn.Server:
    """A server of the front; ``on_tick`` is called each ``TICK_S`` while it serves."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=DRAIN_S,
            callback_notify=on_tick,
            timeout_notify=TICK_S,
        )
    )
