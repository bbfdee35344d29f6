"""Wire: any split gives the same messages, garbage never escapes, and a pair keeps its word."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umad.errors import InvalidParams, LocalProtocolError, RemoteProtocolError, UnknownMethod
from umad.testing import MemoryPair
from umad.wire.connection import Connection, State
from umad.wire.frames import FrameDecoder, Limits, encode
from umad.wire.messages import (
    METHODS,
    Notification,
    Request,
    Response,
    check_params,
    from_frame,
    to_frame,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
maps = st.dictionaries(st.text(max_size=9), values, max_size=5)
ids = st.integers(0, 2**32 - 1)
names = st.text(min_size=1, max_size=64)
messages = (
    st.builds(Request, ids, names, maps)
    | st.builds(Response, ids, st.none(), values)
    | st.builds(Response, ids, maps, st.none())
    | st.builds(Notification, names, maps)
)


def pieces(data, cuts):
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_split_gives_the_same_messages(sent, cuts):
    stream = b"".join(encode(to_frame(message)) for message in sent)
    decoder = FrameDecoder(Limits())
    got = [from_frame(f) for piece in pieces(stream, cuts) for f in decoder.feed(piece)]
    assert got == sent
    assert not decoder.has_partial


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(lambda m, junk: encode(to_frame(m)) + junk, messages, st.binary()),
    st.lists(st.integers(0, 10**6), max_size=6),
    st.sampled_from(["client", "server"]),
    st.booleans(),
)
def test_garbage_gives_messages_or_a_protocol_error(data, cuts, role, handshake):
    connection = Connection(
        role, Limits(message_bytes=200, elements=8, depth=4), handshake=handshake
    )
    try:
        for piece in pieces(data, cuts):
            for message in connection.feed(piece):
                assert isinstance(message, Request | Response | Notification)
    except RemoteProtocolError:
        assert connection.state is State.CLOSED


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.sampled_from(sorted(METHODS)) | names,
    maps
    | st.dictionaries(
        st.sampled_from(sorted({name for row in METHODS.values() for name in row.params})), values
    ),
)
def test_parameters_are_checked_or_refused(method, params):
    try:
        checked = check_params(method, params)
    except (InvalidParams, UnknownMethod):
        return
    assert params.items() <= checked.items()
    assert METHODS[method].required <= checked.keys()


class Pair(RuleBasedStateMachine):
    """Two connections joined in memory against two dicts of open requests."""

    LIMIT = 4

    def __init__(self):
        super().__init__()
        self.pair = MemoryPair(Limits(open_requests=self.LIMIT))
        self.sides = {"client": self.pair.client, "server": self.pair.server}
        self.pipes = {"client": self.pair.to_server, "server": self.pair.to_client}
        self.asked = {"client": {}, "server": {}}  # id -> params, sent and not answered
        self.owed = {"client": {}, "server": {}}  # id -> params, arrived and not answered
        self.flying = {"client": [], "server": []}  # what this side sent, not yet delivered
        self.ready = False

    def other(self, side):
        return "server" if side == "client" else "client"

    @initialize(refusals=st.integers(0, 2))
    def greet(self, refusals):
        for refused in [True] * refusals + [False]:
            number, data = self.pair.client.send_request("hello", {})
            self.pair.to_server += data
            self.pair.pump()
            answer = {"error": {"code": "no"}} if refused else {"result": {}}
            self.pair.to_client += self.pair.server.send_response(number, **answer)
            self.pair.pump()
        self.ready = True

    @rule(side=st.sampled_from(["client", "server"]), params=maps)
    def ask(self, side, params):
        if len(self.asked[side]) >= self.LIMIT:
            try:
                self.sides[side].send_request("ping", params)
            except LocalProtocolError:
                return
            raise AssertionError("a request beyond the limit was sent")
        number, data = self.sides[side].send_request("ping", params)
        assert number not in self.asked[side]
        self.asked[side][number] = params
        self.pipes[side] += data
        self.flying[side].append(Request(number, "ping", params))

    @rule(side=st.sampled_from(["client", "server"]), params=maps)
    def tell(self, side, params):
        self.pipes[side] += self.sides[side].send_notification("progress", params)
        self.flying[side].append(Notification("progress", params))

    @precondition(lambda self: any(self.owed.values()))
    @rule(data=st.data(), result=values)
    def answer(self, data, result):
        side = data.draw(st.sampled_from([side for side in self.owed if self.owed[side]]))
        number = data.draw(st.sampled_from(sorted(self.owed[side])))
        del self.owed[side][number]
        self.pipes[side] += self.sides[side].send_response(number, result=result)
        self.flying[side].append(Response(number, None, result))

    @rule(side=st.sampled_from(["client", "server"]), number=ids)
    def answer_what_nobody_asked(self, side, number):
        if number not in self.owed[side]:
            try:
                self.sides[side].send_response(number)
            except LocalProtocolError:
                return
            raise AssertionError("an answer without a request was sent")

    @rule(chunk=st.integers(0, 7))
    def deliver(self, chunk):
        at_server, at_client = self.pair.pump(chunk)
        for sender, got in (("client", at_server), ("server", at_client)):
            assert got == self.flying[sender]
            self.flying[sender].clear()
            for message in got:
                if isinstance(message, Request):
                    self.owed[self.other(sender)][message.id] = message.params
                elif isinstance(message, Response):
                    del self.asked[self.other(sender)][message.id]

    @invariant()
    def open_requests_agree(self):
        if self.ready:
            for side, connection in self.sides.items():
                assert connection.state is State.READY
                assert connection.open_requests == len(self.asked[side])


TestPair = pytest.mark.slow(Pair.TestCase)
Pair.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
