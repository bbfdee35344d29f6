"""The order of things on one connection."""

import pytest

from umad.errors import LocalProtocolError, RemoteProtocolError
from umad.testing import MemoryPair
from umad.wire.connection import Connection, State
from umad.wire.frames import Limits, encode
from umad.wire.messages import Notification, Request, Response

HELLO = {"versions": [1], "client": "test"}


def ready(limits=None):
    pair = MemoryPair(limits)
    _, pair.to_server[:] = pair.client.send_request("hello", HELLO)
    ((request,), _) = pair.pump()
    pair.to_client += pair.server.send_response(request.id, result={"version": 1})
    pair.pump()
    return pair


def test_hello_makes_both_sides_ready():
    pair = MemoryPair()
    number, data = pair.client.send_request("hello", HELLO)
    assert pair.client.state is State.GREETING
    pair.to_server += data
    ((request,), nothing) = pair.pump(chunk_bytes=1)
    assert (request, nothing) == (Request(number, "hello", HELLO), [])
    assert pair.server.state is State.GREETING
    pair.to_client += pair.server.send_response(number, result={"version": 1})
    assert pair.server.state is State.READY
    assert pair.pump() == ([], [Response(number, None, {"version": 1})])
    assert pair.client.state is State.READY


def test_a_refused_hello_may_be_said_again():
    pair = MemoryPair()
    for _ in range(2):
        number, data = pair.client.send_request("hello", HELLO)
        pair.to_server += data
        pair.pump()
        pair.to_client += pair.server.send_response(number, error={"code": "version_mismatch"})
        pair.pump()
        assert (pair.client.state, pair.server.state) == (State.NEW, State.NEW)
        assert pair.client.open_requests == 0


def test_nothing_may_be_sent_before_hello_is_answered():
    pair = MemoryPair()
    for side in (pair.client, pair.server):
        with pytest.raises(LocalProtocolError):
            side.send_request("ping", {})
        with pytest.raises(LocalProtocolError):
            side.send_notification("progress", {})
    with pytest.raises(LocalProtocolError, match="only a client"):
        pair.server.send_request("hello", HELLO)
    pair.client.send_request("hello", HELLO)
    for method in ("hello", "ping"):
        with pytest.raises(LocalProtocolError, match="while the connection is greeting"):
            pair.client.send_request(method, HELLO)


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize("frame", [[0, 1, "ping", [{}]], [2, "progress", [{}]], [1, 0, None, None]])
def test_nothing_may_arrive_before_hello(role, frame):
    connection = Connection(role)
    with pytest.raises(RemoteProtocolError):
        connection.feed(encode(frame))
    assert connection.state is State.CLOSED
    with pytest.raises(LocalProtocolError):
        connection.feed(b"")


def test_a_request_behind_an_unanswered_hello_breaks_the_protocol():
    server = Connection("server")
    with pytest.raises(RemoteProtocolError):
        server.feed(encode([0, 1, "hello", [HELLO]]) + encode([0, 2, "ping", [{}]]))


def test_hello_twice_and_hello_from_the_server_break_the_protocol():
    hello = encode([0, 99, "hello", [HELLO]])
    pair = ready()
    with pytest.raises(RemoteProtocolError, match="while the connection is ready"):
        pair.server.feed(hello)
    with pytest.raises(RemoteProtocolError, match="only a client does"):
        pair.client.feed(hello)
    pair = ready()
    with pytest.raises(LocalProtocolError):
        pair.client.send_request("hello", HELLO)


def test_both_sides_may_ask_and_tell():
    pair = ready()
    for side, pipe, index in [
        (pair.client, pair.to_server, 0),
        (pair.server, pair.to_client, 1),
    ]:
        number, data = side.send_request("ping", {})
        pipe += data + side.send_notification("progress", {"a": 1})
        assert pair.pump()[index] == [
            Request(number, "ping", {}),
            Notification("progress", {"a": 1}),
        ]


def test_each_request_is_answered_once():
    pair = ready()
    number, data = pair.client.send_request("ping", {})
    pair.server.feed(data)
    with pytest.raises(LocalProtocolError, match="not both"):
        pair.server.send_response(number, result={}, error={})
    with pytest.raises(LocalProtocolError, match="encoded"):
        pair.server.send_response(number, result=object())
    answer = pair.server.send_response(number, result={})
    with pytest.raises(LocalProtocolError, match="no request"):
        pair.server.send_response(number, result={})
    assert pair.client.feed(answer) == [Response(number, None, {})]
    with pytest.raises(RemoteProtocolError, match="nobody asked"):
        pair.client.feed(answer)


def test_an_id_is_not_used_twice():
    pair = ready()
    request = encode([0, 5, "ping", [{}]])
    with pytest.raises(RemoteProtocolError, match="two open requests"):
        pair.server.feed(request * 2)


def test_open_requests_are_limited_on_both_sides():
    pair = ready(Limits(open_requests=3))
    sent = [pair.client.send_request("ping", {}) for _ in range(3)]
    with pytest.raises(LocalProtocolError, match="limit"):
        pair.client.send_request("ping", {})
    pair.server.feed(b"".join(data for _, data in sent))
    pair.client.feed(pair.server.send_response(sent[0][0], result={}))
    number, data = pair.client.send_request("ping", {})
    assert number not in {number for number, _ in sent}
    pair.server.feed(data)
    with pytest.raises(RemoteProtocolError, match="more than 3"):
        pair.server.feed(encode([0, 1000, "ping", [{}]]))


def test_ids_wrap_around_and_step_over_open_ones():
    connection = Connection("client", handshake=False)
    assert connection.send_request("ping", {})[0] == 0
    connection._next_id = 2**32 - 1  # four billion calls later
    assert connection.send_request("ping", {})[0] == 2**32 - 1
    assert connection.send_request("ping", {})[0] == 1


def test_a_private_link_needs_no_hello():
    pair = MemoryPair(handshake=False)
    number, data = pair.server.send_request("hello", {})
    pair.to_client += data
    assert pair.pump()[1] == [Request(number, "hello", {})]
    pair.to_server += pair.client.send_response(number)
    assert pair.pump()[0] == [Response(number, None, None)]


def test_half_a_message_is_told():
    server = Connection("server")
    server.feed(b"\x94")
    assert server.has_partial


def test_closing_ends_everything():
    pair = ready()
    number, data = pair.client.send_request("ping", {})
    pair.server.feed(data)
    for side in (pair.client, pair.server):
        side.close()
        side.close()
        with pytest.raises(LocalProtocolError):
            side.send_request("ping", {})
        with pytest.raises(LocalProtocolError):
            side.send_notification("ping", {})
    with pytest.raises(LocalProtocolError):
        pair.server.send_response(number)
