"""The channel between two processes of an engine: datagrams, parcels, ends, and what is refused."""

import array
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from umad.errors import LocalProtocolError, RemoteProtocolError
from umad.serve.parcel import PARCEL_BYTES, Channel
from umad.wire.frames import Limits, encode
from umad.wire.messages import Notification, Request, Response

LIMITS = Limits(message_bytes=8 << 20, open_requests=4)
GARBAGE = b"\xc1"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = sockets()
    client, server = Channel(ours, "client", LIMITS), Channel(theirs, "server", LIMITS)
    try:
        yield client, server
    finally:
        client.dispose()
        server.dispose()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def raw(role: Any = "client") -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and its other end bare."""
    ours, theirs = sockets()
    channel = Channel(ours, role, LIMITS)
    with theirs:
        theirs.settimeout(5)
        try:
            yield channel, theirs
        finally:
            channel.dispose()


def memfd(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("size", [0, 1, PARCEL_BYTES - 64, PARCEL_BYTES, 3 << 20])
def test_a_request_and_its_answer_of_any_size(size):
    with channels() as (client, server):
        data = os.urandom(size)
        before = open_fds()
        ident = client.request("run", {"job": {"image": data}})
        [asked] = server.receive()
        assert isinstance(asked, Request)
        assert asked.params == {"job": {"image": data}}
        server.answer(asked.id, result={"images": [data, b"x"]})
        [answer] = client.receive()
        assert answer == Response(ident, None, {"images": [data, b"x"]})
        assert type(answer.result["images"][0]) is bytes
        assert open_fds() == before


def test_an_image_goes_by_sealed_memory_and_not_through_the_socket():
    image = os.urandom(3 << 20)
    with raw() as (channel, other):
        channel.request("run", {"image": image})
        data, fds, _, _ = socket.recv_fds(other, 1 << 20, 4)
        assert data == b"\0"
        [fd] = fds
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1)
        _, _, method, [params] = msgpack.unpackb(os.pread(fd, os.fstat(fd).st_size, 0))
        assert (method, params["image"]) == ("run", image)
        os.close(fd)


def test_what_is_too_large_or_cannot_travel_fails_alone():
    with channels() as (client, server):
        with pytest.raises(LocalProtocolError):
            client.request("run", {"image": bytes(LIMITS.message_bytes)})
        with pytest.raises(LocalProtocolError):
            client.request("run", {"image": object()})
        client.request("run", {})
        [asked] = server.receive()
        server.answer(asked.id, result={"image": bytes(LIMITS.message_bytes)})
        [answer] = client.receive()
        assert "cannot travel" in answer.error["message"]


def test_many_threads_may_send():
    with channels() as (client, server):
        payload = bytes(PARCEL_BYTES)

        def tell(number: int) -> None:
            for at in range(20):
                client.notify("n", {"of": number, "at": at, "data": payload if at % 3 else b""})

        threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        seen: list[tuple[int, int]] = []
        while len(seen) < 80:
            for note in server.receive():
                assert isinstance(note, Notification)
                seen.append((note.params["of"], note.params["at"]))
        for thread in threads:
            thread.join()
        for number in range(4):
            assert [at for of, at in seen if of == number] == list(range(20))


def test_the_end_of_one_end_is_the_end_of_the_other():
    with channels() as (client, server):
        server.notify("last", {})
        server.close()
        assert client.receive() == [Notification("last", {})]
        assert client.receive() is None
        client.notify("nobody", {"data": bytes(PARCEL_BYTES)})  # nothing happens
        client.request("run", {})
        server.dispose()
        client.dispose()
        client.notify("nobody", {})


def test_closing_wakes_the_thread_that_receives():
    with channels() as (client, _server):
        ended = threading.Event()

        def read() -> None:
            assert client.receive() is None
            ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        client.close()
        assert ended.wait(5)
        thread.join()


def _send(other: socket.socket, data: bytes, *fds: int) -> None:
    rights = array.array("i", fds)
    other.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@pytest.mark.parametrize(
    "seals", [0, SEALS & ~fcntl.F_SEAL_WRITE, SEALS & ~fcntl.F_SEAL_SHRINK], ids=hex
)
def test_memory_that_its_sender_could_still_change_is_refused(seals):
    with raw() as (channel, other):
        before = open_fds()
        fd = memfd(encode([2, "state", [{}]]), seals)
        _send(other, b"\0", fd)
        with pytest.raises(RemoteProtocolError, match="sealed"):
            channel.receive()
        os.close(fd)
        assert open_fds() == before
        assert other.recv(1) == b""  # closed


def test_other_parcels_that_are_refused():
    note = encode([2, "state", [{}]])
    for make in (
        lambda: [memfd(note), memfd(note)],
        lambda: [memfd(b"")],
        lambda: [memfd(bytes(LIMITS.message_bytes + 1))],
        lambda: [os.open("/dev/null", os.O_RDONLY)],
        lambda: [memfd(GARBAGE)],
    ):
        before = open_fds()
        with raw() as (channel, other):
            fds = make()
            _send(other, b"\0", *fds)
            with pytest.raises(RemoteProtocolError):
                channel.receive()
            for fd in fds:
                os.close(fd)
        assert open_fds() == before


def test_a_datagram_that_is_no_message_closes_the_channel():
    with raw() as (channel, other):
        other.send(GARBAGE)
        with pytest.raises(RemoteProtocolError):
            channel.receive()
        assert channel.receive() is None
