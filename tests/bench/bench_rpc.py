"""reserve -> answer over the socket, beside a bare asyncio echo at the same pace."""

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.bench import crowd
from tests.bench.figures import Figure, at_most, ratio
from tests.daemon.running import ROOT, Daemon, eventually, running
from umad.client import Client
from umad.units import MIB

ROUNDS = 1500
PACE_S = 0.002  # as forward_done: a wake-up each, caches warm as in a busy server
NOTIFY_PACE_S = 0.002
CROWDS = 5
PAYLOAD = b"x" * 64  # about what a reserve and its answer take


def run() -> list[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="umad-") as folder,
        running(Path(folder), "", "--dry-run") as daemon,
    ):
        echo = Echo(Path(folder) / "echo.sock")
        try:
            with daemon.client() as client:
                ours, theirs = _interleaved(client, echo)
                done = _forward_done(client)
        finally:
            echo.close()
        calls_s, bare_s = _crowds(daemon, folder)
    return [
        ratio("rpc", "reserve -> answer p50, over a bare asyncio echo", ours, theirs, 1.5),
        at_most("rpc", "forward_done at the caller, one per 2 ms", done, "us", 10),
        Figure(
            "rpc",
            "pings of 50 clients, 16 under way each, on 2 cores",
            statistics.median(calls_s),
            "1/s",
            ">= 80000",
            statistics.median(bare_s),
            len(calls_s),
            min(calls_s),
            max(calls_s),
            statistics.median(calls_s) >= 80_000,
        ),
    ]


class Echo:
    """The rival: an asyncio server that sends back what it gets, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_rpc", str(path)], cwd=ROOT
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pause = threading.Event()
        while self._socket.connect_ex(str(path)) != 0:
            pause.wait(0.02)

    def call(self) -> None:
        self._socket.sendall(PAYLOAD)
        self._socket.recv(4096)

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(10)


def _interleaved(client: Client, echo: Echo) -> tuple[list[float], list[float]]:
    worker = client.call("register", {"model": "bench", "quota": 4096})["worker"]
    ours, theirs = [], []
    pause = threading.Event()
    for _ in range(ROUNDS):
        before = time.perf_counter()
        lease = client.call("reserve", {"worker": worker, "bytes": 4096})
        ours.append((time.perf_counter() - before) * 1e6)
        client.call("void", {"lease": lease["lease"], "token": lease["token"]})
        pause.wait(PACE_S)
        before = time.perf_counter()
        echo.call()
        theirs.append((time.perf_counter() - before) * 1e6)
        pause.wait(PACE_S)
    return ours, theirs


def _forward_done(client: Client) -> list[float]:
    worker = client.call("register", {"model": "forward", "quota": MIB})["worker"]
    report = {"predicted": 1, "peak": 1, "tokens": 16, "batch": 1, "seconds": 0.01}
    taken = []
    pause = threading.Event()
    for _ in range(1000):
        before = time.perf_counter()
        client.notify("forward_done", {"worker": worker, **report})
        taken.append((time.perf_counter() - before) * 1e6)
        pause.wait(NOTIFY_PACE_S)
    return taken


def _crowds(daemon: Daemon, folder: str) -> tuple[list[float], list[float]]:
    """Calls a second that 50 clients get, of the daemon and of bare MessagePack over asyncio."""
    path = Path(folder) / "crowd.sock"
    rival = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.crowd", "serve", str(path)], cwd=ROOT
    )
    try:
        eventually(path.exists)
        pairs = [
            (crowd.calls_per_s(str(daemon.socket)), crowd.calls_per_s(str(path)))
            for _ in range(CROWDS)
        ]
    finally:
        rival.terminate()
        rival.wait(10)
    ours, theirs = zip(*pairs, strict=True)
    return list(ours), list(theirs)


def _serve(path: str) -> None:
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)  # type: ignore[attr-defined]

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Protocol, path)
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    _serve(sys.argv[1])
