"""An HTTP client for benchmarks, by hand: a library's costs as much as the servers do."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    retry_after: int | None
    content: bytes


class Client:
    """Of one port; it has as many connections as are in use at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Ask and read the answer.

        Raises:
            OSError: nobody listens.
            asyncio.IncompleteReadError: the connection ended.
        """
        data = json.dumps(body).encode()
        request = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode() + data
        while True:
            used = bool(self._idle)
            reader, writer = self._idle.pop() if used else await self._connect()
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = _field(head, b"content-length")
                content = await reader.readexactly(int(length or 0))
            except (ConnectionError, asyncio.IncompleteReadError):
                writer.close()
                if not used:  # else the server had closed one that was idle for long
                    raise
            except BaseException:
                writer.close()
                raise
            else:
                break
        if not length or _field(head, b"connection") == b"close":
            writer.close()  # what comes without a length is not read, and nothing after it
        else:
            self._idle.append((reader, writer))
        named = _field(head, b"retry-after")
        wait_s = int(named) if named.isdigit() else None
        return Answer(int(head.split(b" ", 2)[1]), wait_s, content)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self._port)


def _field(head: bytes, name: bytes) -> bytes:
    found = re.search(rb"(?i)\r\n" + name + rb": *([^\r]*)", head)
    return found[1].strip().lower() if found else b""
