import inspect

import pytest

from umad import errors
from umad.errors import BY_CODE, UmadError, from_wire


@pytest.mark.parametrize("kind", errors.leaves(), ids=lambda kind: kind.code)
def test_every_leaf_has_a_row_in_the_table(kind: type[UmadError]) -> None:
    assert BY_CODE[kind.code] is kind, "two errors share a code"
    assert 400 <= kind.http_status < 600
    assert 0 < kind.exit_code < 128
    assert inspect.getdoc(kind), "says when it is raised, whose fault it is, what to do"
    if kind.retryable:
        assert kind.http_status in (409, 429, 503)


@pytest.mark.parametrize("kind", errors.leaves(), ids=lambda kind: kind.code)
def test_an_error_survives_the_wire(kind: type[UmadError]) -> None:
    sent = kind("no room", retry_after_s=1.5, details={"asked_bytes": 3})
    got = from_wire(sent.to_wire())
    assert type(got) is kind
    assert (got.message, got.retry_after_s, got.details) == ("no room", 1.5, {"asked_bytes": 3})


def test_a_refusal_is_never_a_server_error() -> None:
    for kind in errors.leaves(errors.RequestRejected):
        assert kind.http_status in (400, 403, 404, 408, 409, 413, 429, 503)


@pytest.mark.parametrize("sent", [None, 5, "no", [1]])
def test_an_error_that_is_no_map(sent: object) -> None:
    assert from_wire(sent).code == "remote_protocol"


def test_an_error_of_a_newer_peer_is_a_refusal() -> None:
    got = from_wire({"code": "brand_new", "message": "hm", "details": 3, "retry_after_s": "x"})
    assert type(got) is errors.RequestRejected
    assert (got.message, got.retry_after_s, got.details) == ("hm", None, {})
    assert from_wire({}).message == "no reason given"
