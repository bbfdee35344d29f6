"""Messages that come at once: their answers leave together, in order, and none is kept back."""

import os
import socket
from typing import Any

import pytest

from tests.daemon.running import Daemon, Raw
from umad.units import MIB

pytestmark = pytest.mark.slow


def at_once(peer: Raw, *calls: tuple[str, dict[str, Any]]) -> list[int]:
    """Send several requests as one piece; their ids."""
    asked = [peer.wire.send_request(method, params) for method, params in calls]
    peer.socket.sendall(b"".join(data for _, data in asked))
    return [key for key, _ in asked]


def answered(peer: Raw, count: int) -> tuple[list[int], list[int]]:
    """The ids of the next answers as they come, and the descriptors that came with them."""
    keys: list[int] = []
    fds: list[int] = []
    while len(keys) < count:
        data, more, _, _ = socket.recv_fds(peer.socket, 4096, 4)
        assert data, "the daemon closed the connection"
        fds += more
        keys += [message.id for message in peer.wire.feed(data)]  # type: ignore[union-attr]
    return keys, fds


def test_answers_to_calls_that_came_at_once_come_in_order(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        asked = at_once(peer, *[("ping", {})] * 200)
        assert answered(peer, 200) == (asked, [])
        assert peer.call("ping") == {}, "and one alone is answered as ever"


def test_more_answers_than_are_held_together_all_come(daemon: Daemon) -> None:
    with Raw(daemon.socket) as peer:
        asked = at_once(peer, *[("status", {})] * 200)
        assert answered(peer, 200) == (asked, [])


def test_an_answer_with_a_descriptor_keeps_its_place(daemon: Daemon) -> None:
    register = {"model": "paged", "quota": MIB, "guard": True}
    with Raw(daemon.socket) as peer:
        asked = at_once(peer, ("ping", {}), ("register", register), ("ping", {}))
        keys, fds = answered(peer, 3)
        for fd in fds:
            os.close(fd)
        assert keys == asked
        assert len(fds) == 1
