"""Many clients of one socket in one process, each with several calls under way.

They ask for nothing but an answer, in bytes made beforehand, so that the server is what is
measured.  ``python -m tests.bench.crowd SOCKET`` prints the calls a second; with ``serve`` in
front of it, it is the rival: bare MessagePack over asyncio.
"""

import asyncio
import select
import socket
import sys
import time
from typing import Any

import msgpack

CLIENTS = 50
UNDER_WAY = 16  # calls of one client
SECONDS = 2.0
HELLO = msgpack.packb([0, 0, "hello", [{"versions": [1], "client": "crowd"}]])
CALLS = b"".join(msgpack.packb([0, key, "ping", [{}]]) for key in range(UNDER_WAY))
ANSWERS = sum(len(msgpack.packb([1, key, None, {}])) for key in range(UNDER_WAY))


def calls_per_s(path: str) -> float:
    """Each client asks again as soon as it has all its answers."""
    poll = select.epoll()
    clients: dict[int, socket.socket] = {}
    for _ in range(CLIENTS):
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        client.sendall(HELLO)
        assert client.recv(4096), "hello is answered"
        clients[client.fileno()] = client
        poll.register(client, select.EPOLLIN)
    owed = dict.fromkeys(clients, ANSWERS)
    began_s = time.perf_counter()
    for client in clients.values():
        client.sendall(CALLS)
    done = 0
    while owed:
        again = time.perf_counter() < began_s + SECONDS
        for fd, _ in poll.poll():
            owed[fd] -= len(clients[fd].recv(4096))
            if owed[fd] == 0:
                done += UNDER_WAY
                if again:
                    owed[fd] = ANSWERS
                    clients[fd].sendall(CALLS)
                else:
                    del owed[fd]
    taken_s = time.perf_counter() - began_s
    for client in clients.values():
        client.close()
    return done / taken_s


class Rival(asyncio.Protocol):
    """Decodes what comes and answers it, and nothing else."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._unpacker = msgpack.Unpacker()
        self._pack = msgpack.Packer().pack

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._transport.write(self._pack([1, message[1], None, {}]))


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Rival, path)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve(sys.argv[2]))
    else:
        print(calls_per_s(sys.argv[1]))
