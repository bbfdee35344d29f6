"""C39: peers that break the protocol lose their own connection and nothing else happens."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from tests.daemon.running import Daemon, Raw
from umad.units import MIB

pytestmark = pytest.mark.slow

HELLO = b"\x94\x00\x00\xa5hello\x91\x82\xa8versions\x91\x01\xa6client\xa1x"


def as_str(text: str) -> bytes:
    return bytes([0xA0 | len(text)]) + text.encode()


def request(method: str, params: bytes) -> bytes:
    return b"\x94\x00\x01" + as_str(method) + b"\x91" + params


# name -> (bytes after hello, seconds within which the connection must be closed)
ABUSES: dict[str, tuple[bytes, float]] = {
    "a zero byte": (b"\x00", 2),
    "a thousand zeros": (b"\x00" * 1000, 2),
    "a huge length": (b"\xdb\xff\xff\xff\xff", 8),
    "half a message, then silence": (request("ping", b"\xdf")[:-1] + b"\x81", 8),
    "an array of a billion": (b"\xdd\x3b\x9a\xca\x00", 2),
    "a hundred thousand nested arrays": (b"\x91" * 100_000 + b"\x90", 2),
    "a megabyte of empty maps": (b"\xdd" + struct.pack(">I", 1 << 20) + b"\x80" * (1 << 20), 2),
    "an extension type": (request("ping", b"\xc7\x01\x7f\x00"), 2),
    "a key twice": (
        request("register", b"\x82" + (as_str("quota") + b"\x01") * 2),
        2,
    ),
    "a key that is no text": (request("ping", b"\x81\x01\x01"), 2),
    "text that is no utf-8": (request("ping", b"\x81\xa1\xff\x01"), 2),
    "an answer nobody asked for": (b"\x94\x01\x07\xc0\xc0", 2),
    "params without their array": (b"\x94\x00\x01\xa4ping\x80", 2),
}


class Pinger(threading.Thread):
    """A good worker that pings at 20 Hz; keeps its slowest round trip."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        self._peer = Raw(daemon.socket)
        self._ended = threading.Event()
        self.slowest_s = 0.0
        self.count = 0

    def run(self) -> None:
        while not self._ended.wait(0.05):
            before_s = time.perf_counter()
            self._peer.call("ping")
            self.slowest_s = max(self.slowest_s, time.perf_counter() - before_s)
            self.count += 1

    def end(self) -> None:
        self._ended.set()
        self.join(5)
        self._peer.close()


def send(peer: Raw, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed in our face: good
        peer.socket.sendall(data)


def test_each_abuse_costs_its_own_connection_and_nothing_else(daemon: Daemon) -> None:
    pinger = Pinger(daemon)
    pinger.start()
    before = daemon.rss()
    for name, (data, within_s) in ABUSES.items():
        with Raw(daemon.socket) as peer:
            peer.call("register", model="victim", quota=MIB)
            send(peer, data)
            assert peer.closed_within(within_s), name
        assert daemon.rss() - before < 80 * MIB, name
    pinger.end()
    assert pinger.count > 0
    assert pinger.slowest_s < 0.05
    state = daemon.status()
    assert state["workers_total"] == 0 or all(
        worker["state"] in ("cut off", "leaving") for worker in state["workers"]
    )
    assert state["counters"]["protocol_violations"] >= len(ABUSES)


@pytest.mark.parametrize(
    "before_hello",
    [
        lambda peer: None,
        lambda peer: peer.socket.sendall(request("ping", b"\x80")),
        lambda peer: peer.socket.sendall(HELLO[:-3]),
    ],
    ids=["silence", "another method", "half a hello"],
)
def test_a_peer_must_say_hello(daemon: Daemon, before_hello: Callable[[Raw], None]) -> None:
    with Raw(daemon.socket, hello=False) as peer:
        before_hello(peer)
        assert peer.closed_within(8)


def test_half_a_close_ends_the_connection_without_a_spin(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        peer.socket.sendall(b"\x94\x00")
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.closed_within(2)


def test_idle_connections_have_a_bound_and_do_not_slow_the_others(daemon: Daemon) -> None:
    pinger = Pinger(daemon)
    pinger.start()
    peers = []
    refused = 0
    for _ in range(500):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(10)
        peer.connect(str(daemon.socket))
        peers.append(peer)
    for peer in peers:
        try:
            peer.sendall(HELLO)
            refused += not peer.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            refused += 1
    assert refused >= 500 - 256
    assert daemon.rss() < 80 * MIB
    pinger.end()
    assert pinger.slowest_s < 0.05
    for peer in peers:
        peer.close()
    with Raw(daemon.socket) as peer:
        assert peer.call("ping") == {}


def test_who_does_not_read_its_answers_is_let_go(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        peer.socket.settimeout(5)
        asked = b"".join(request("status", b"\x80") for _ in range(1))
        try:
            for number in range(200_000):
                peer.socket.sendall(
                    asked.replace(b"\x94\x00\x01", b"\x94\x00" + bytes([number % 100]), 1)
                )
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
    with Raw(daemon.socket) as good:
        assert good.call("ping") == {}
    assert daemon.rss() < 80 * MIB
