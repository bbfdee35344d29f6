"""The status page at ``/``: its routes, and the asking of the daemon.

Rules: it only reads; the daemon is asked, and the page drawn, in a thread and once a second at
most, however many look; without the daemon there is a page that says so.  It is as open as
``/status`` and ``/metrics``, which say the same to programs: whoever may ask for answers may see
who gives them.  What is on it stands in ``picture``.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from umad.client import connect
from umad.errors import UmadError
from umad.serve.picture import Heard, draw

KEPT_S: Final = 1.0
DAEMON_TIMEOUT_S: Final = 1.0
STATIC: Final = Path(__file__).with_name("static")
_PARTS: Final = {
    "status.css": "text/css",
    "status.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing written into the page itself, no frame around it.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; "
        "style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StatusPage:
    """The page and the files it needs.

    Args:
        socket: the daemon's.
        look: the front's state as ``/status`` shows it; called in the front's loop.
    """

    def __init__(self, socket: str, look: Callable[[], Mapping[str, Any]]) -> None:
        self._socket = socket
        self._look = look
        self._parts = {name: (STATIC / name).read_bytes() for name in _PARTS}
        self._asking = asyncio.Lock()
        self._heard = Heard()
        self._page = ""
        self._drawn_s = float("-inf")

    async def show(self, _: Request) -> Response:
        """GET /: as HTML, whatever the client would rather have."""
        async with self._asking:
            if time.monotonic() - self._drawn_s >= KEPT_S:
                self._page = await asyncio.to_thread(self._draw, self._look())
                self._drawn_s = time.monotonic()
        return HTMLResponse(self._page, headers=_HEADERS)

    async def part(self, request: Request) -> Response:
        """GET /page/NAME: its style, its script, its icon."""
        name = request.path_params["name"]
        if name not in _PARTS:
            raise HTTPException(404)
        return Response(self._parts[name], headers=_HEADERS, media_type=_PARTS[name])

    def _draw(self, look: Mapping[str, Any]) -> str:
        self._heard = _ask(self._socket, self._heard)
        return draw(look, self._heard, time.time())


def _ask(socket: str, before: Heard) -> Heard:
    """What the daemon says now; without one, why, and since when."""
    try:
        with connect(socket, name="umad-serve page", timeout_s=DAEMON_TIMEOUT_S) as client:
            return Heard(client.call("status"), client.call("events")["events"])
    except UmadError as error:
        return Heard(problem=error.message, since_unix_s=before.since_unix_s or time.time())
