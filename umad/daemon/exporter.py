"""A listener for ``GET /metrics``: the daemon's figures for a scraper that cannot ask umad-serve.

Owns its listening socket and short connections, one request each, in the daemon's loop.  Rules:
few connections at a time, a small request, a deadline for all of it; nothing a peer does ends or
delays the daemon, so nothing is raised here.  Bytes and their meaning are h11's.
"""

import asyncio
import socket
from pathlib import Path
from typing import Final

import h11

from umad.daemon import listen
from umad.daemon.metrics import MEDIA_TYPE, Metrics
from umad.errors import ConfigError

CONNECTIONS_MAX: Final = 16
REQUEST_BYTES_MAX: Final = 8 * 1024
WITHIN_S: Final = 5.0
PAUSE_S: Final = 1.0
_PLAIN: Final = "text/plain; charset=utf-8"


def bind(address: str | tuple[str, int] | None, gid: int | None) -> listen.Listener | None:
    """Listen where ``metrics.listen`` says.

    Args:
        address: a Unix socket's path, open to a group; (host, port); None for nowhere.
        gid: that group.

    Raises:
        ConfigError: it cannot be had, with the reason.
    """
    if address is None:
        return None
    if isinstance(address, str):
        return listen.bind(Path(address), gid)
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror or error}; end what "
            "holds it, or change metrics.listen (umad.service may use Unix sockets only)"
        ) from error
    return listen.Listener(sock)


class Exporter:
    """Answers scrapers on an already listening socket, which stays the caller's."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, metrics: Metrics
    ) -> None:
        self.loop = loop
        self.metrics = metrics
        self.open: set[_Scrape] = set()
        self._listener = listener
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting and end all connections."""
        self.loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()
        for scrape in list(self.open):
            scrape.close()

    def _listen(self) -> None:
        self.loop.add_reader(self._listener, self._acceptable)

    def _acceptable(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: it stays readable, so leave it alone for a while
            self.loop.remove_reader(self._listener)
            self._again = self.loop.call_later(PAUSE_S, self._listen)
            return
        if len(self.open) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        self.open.add(_Scrape(self, sock))


class _Scrape:
    """One connection: a request, its answer, the end."""

    def __init__(self, exporter: Exporter, sock: socket.socket) -> None:
        self._exporter = exporter
        self._sock = sock
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self._head = False
        self._out = b""
        self._deadline = exporter.loop.call_later(WITHIN_S, self.close)
        exporter.loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self._deadline.cancel()
        self._exporter.loop.remove_reader(self._sock)
        self._exporter.loop.remove_writer(self._sock)
        self._exporter.open.discard(self)
        self._sock.close()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(REQUEST_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._answer(error.error_status_hint, b"this is no request that is understood here\n")
            return
        if isinstance(event, h11.Request):
            self._serve(event)

    def _serve(self, request: h11.Request) -> None:
        self._head = request.method == b"HEAD"
        path = request.target.partition(b"?")[0]
        if path != b"/metrics":
            self._answer(404, b"the figures are at /metrics\n")
        elif request.method not in (b"GET", b"HEAD"):
            self._answer(405, b"only GET\n", ("Allow", "GET, HEAD"))
        elif any(b"gzip" in value for name, value in request.headers if name == b"accept-encoding"):
            text = self._exporter.metrics.compressed()
            self._answer(200, text, ("Content-Encoding", "gzip"), media_type=MEDIA_TYPE)
        else:
            self._answer(200, self._exporter.metrics.text(), media_type=MEDIA_TYPE)

    def _answer(
        self, status: int, body: bytes, *headers: tuple[str, str], media_type: str = _PLAIN
    ) -> None:
        """Send it and, once it has left, close; what the peer still says is not read."""
        self._exporter.loop.remove_reader(self._sock)
        response = h11.Response(
            status_code=status,
            headers=[
                ("Content-Type", media_type),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                *headers,
            ],
        )
        self._out = self._http.send(response) or b""
        if not self._head:
            self._out += body
        self._writable()

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        self._out = self._out[sent:]
        if self._out:
            self._exporter.loop.add_writer(self._sock, self._writable)
        else:
            self.close()
