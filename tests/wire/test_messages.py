"""Shapes, and the table of methods against PROTOCOL.md."""

import re
from importlib import resources
from itertools import takewhile

import pytest

from umad.errors import InvalidParams, RemoteProtocolError, UnknownMethod
from umad.wire.messages import (
    METHODS,
    NOTICES,
    Form,
    Notification,
    Request,
    Response,
    check_param,
    check_params,
    from_frame,
    to_frame,
)

RESERVE = {"worker": 1, "bytes": 5, "wait_s": 1.5}
GOOD = {
    "register": {"model": "llama-70b.q4", "quota": 1, "instance": 1, "pin": True, "held": 0},
    "commit": {"lease": 1, "token": 2, "measured": 0},
    "release": {"lease": 1, "token": 2, "leaked": True},
    "progress": {"worker": 1, "stage": "ready", "ratio": 1},
    "evict": {"name": "llama/1"},
    "hello": {"versions": [1], "client": "x"},
    "reserve": {"worker": 1, "parts": [1, 2]},
}
GOOD_NOTICES = {
    "event": {"seq": 1, "name": "killed", "unix_s": 1.7e9, "anything": "else"},
    "queued": {"worker": 1, "what": "admit", "position": 0, "reason": ""},
    "evict": {"worker": 1, "reason": "idle", "for_worker": "qwen/1", "deadline_s": 30},
}


@pytest.mark.parametrize(
    "message",
    [
        Request(0, "ping", {}),
        Request(2**32 - 1, "reserve", RESERVE),
        Response(7, None, {"a": 1}),
        Response(7, {"code": "x"}, None),
        Response(7, None, None),
        Notification("progress", {}),
    ],
)
def test_a_message_survives_the_wire(message):
    assert from_frame(to_frame(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        None,
        {},
        [],
        [0],
        [3, 1, "x", [{}]],
        [False, 1, "ping", [{}]],
        [0.0, 1, "ping", [{}]],
        [True, 1, None, None],
        ["0", 1, "ping", [{}]],
        [[], 1],
        [0, 1, "ping"],
        [0, 1, "ping", [{}], 1],
        [0, -1, "ping", [{}]],
        [0, 2**32, "ping", [{}]],
        [0, True, "ping", [{}]],
        [0, 1.0, "ping", [{}]],
        [0, 1, "", [{}]],
        [0, 1, "x" * 65, [{}]],
        [0, 1, b"ping", [{}]],
        [0, 1, "ping", {}],
        [0, 1, "ping", []],
        [0, 1, "ping", [{}, {}]],
        [0, 1, "ping", [[]]],
        [1, 1, None],
        [1, "1", None, None],
        [1, 1, "no", None],
        [1, 1, {}, {}],
        [2, "progress", [{}], 1],
        [2, 1, [{}]],
    ],
)
def test_any_other_shape_breaks_the_protocol(frame):
    with pytest.raises(RemoteProtocolError):
        from_frame(frame)


@pytest.mark.parametrize("method", GOOD)
def test_good_parameters_pass(method):
    assert GOOD[method].items() <= check_params(method, GOOD[method]).items()


@pytest.mark.parametrize("method", GOOD_NOTICES)
def test_good_notices_pass(method):
    assert check_params(method, GOOD_NOTICES[method], NOTICES) == GOOD_NOTICES[method]


def test_defaults_are_filled_in_and_the_callers_dict_is_left_alone():
    params = {"model": "llama", "quota": 1}
    checked = check_params("register", params)
    assert params == {"model": "llama", "quota": 1}
    assert checked == {
        **params,
        "instance": 0,
        "pool": "system",
        "priority": 0,
        "pin": False,
        "thread": 0,
        "guard": False,
        "recycle": False,
        "evict": False,
        "settle_s": 60.0,
    }


@pytest.mark.parametrize(
    "size", [True, 1.0, float("nan"), float("inf"), None, "5", 0, -1, 2**63, [], {}, b"5"]
)
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(InvalidParams, match=r"bytes was .* it must be an integer of bytes above 0"):
        check_params("reserve", {"worker": 1, "bytes": size})


@pytest.mark.parametrize(
    ("method", "changed", "field"),
    [
        ("register", {"model": "-llama"}, "model"),
        ("register", {"model": ""}, "model"),
        ("register", {"model": "x" * 65}, "model"),
        ("register", {"model": "modèle"}, "model"),
        ("register", {"model": "llama\n"}, "model"),
        ("register", {"pin": 1}, "pin"),
        ("register", {"priority": 1001}, "priority"),
        ("register", {"instance": -1}, "instance"),
        ("progress", {"ratio": 1.01}, "ratio"),
        ("progress", {"ratio": float("nan")}, "ratio"),
        ("progress", {"ratio": True}, "ratio"),
        ("progress", {"stage": "x" * 201}, "stage"),
        ("progress", {"stage": ""}, "stage"),
        ("reserve", {"wait_s": float("inf")}, "wait_s"),
        ("reserve", {"wait_s": -1}, "wait_s"),
        ("reserve", {"parts": []}, "parts"),
        ("reserve", {"parts": [1, 0]}, "parts"),
        ("reserve", {"parts": [1] * 65}, "parts"),
        ("hello", {"versions": 1}, "versions"),
        ("evict", {"name": "llama/"}, "name"),
        ("evict", {"name": "llama/01"}, "name"),
        ("evict", {"name": "llama/1/2"}, "name"),
        ("evict", {"name": "llama/1\n"}, "name"),
        ("commit", {"measured": -1}, "measured"),
    ],
)
def test_the_refusal_names_the_parameter(method, changed, field):
    with pytest.raises(InvalidParams, match=f"^{method}: {field} was ") as caught:
        check_params(method, {**GOOD[method], **changed})
    assert caught.value.details["param"] == field
    assert caught.value.details["accepts"] in caught.value.message


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("queued", {"what": "else"}),
        ("queued", {"what": []}),
        ("event", {"name": 7}),
        ("evict", {"deadline_s": -1}),
    ],
)
def test_a_notice_is_checked_too(method, changed):
    with pytest.raises(InvalidParams, match=f"^{method}: {min(changed)} was "):
        check_params(method, {**GOOD_NOTICES[method], **changed}, NOTICES)


def test_a_refusal_shows_little_of_what_was_sent():
    with pytest.raises(InvalidParams) as caught:
        check_params("reserve", {"worker": 1, "bytes": "x" * 60_000})
    assert len(caught.value.message) < 200
    with pytest.raises(InvalidParams, match="list of 3"):
        check_params("reserve", {"worker": 1, "bytes": [1, 2, 3]})


def test_missing_unknown_and_no_method():
    with pytest.raises(InvalidParams, match="lease is missing; it is an integer"):
        check_params("commit", {"token": 1, "measured": 1})
    with pytest.raises(InvalidParams, match="unknown parameter str 'quotas'; it takes: worker"):
        check_params("reserve", {"worker": 1, "quotas": 2})
    with pytest.raises(InvalidParams, match="it takes: none"):
        check_params("ping", {"x": 1})
    with pytest.raises(UnknownMethod, match="no method str 'fly'"):
        check_params("fly", {})


def test_one_parameter_alone():
    assert check_param("admit", "bytes", 5) == 5
    with pytest.raises(InvalidParams, match="admit: bytes"):
        check_param("admit", "bytes", 5.0)


def described():
    """(form, method, required, optional) of each row in PROTOCOL.md's three tables."""
    text = resources.files("umad.wire").joinpath("PROTOCOL.md").read_text("utf-8")
    for form, heading in [
        (Form.REQUEST, "## Methods a client calls"),
        (Form.FROM_CLIENT, "Notifications a client sends:"),
        (Form.FROM_DAEMON, "Notifications the daemon sends:"),
    ]:
        lines = text.split(heading)[1].splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("| `"))
        for line in takewhile(str.strip, lines[first:]):
            cells = re.split(r"(?<!\\)\|", line)
            fields = re.findall(r"`(\w+)(\??)[:`]", re.sub(r"\([^)]*\)", "", cells[2]))
            required = {name for name, optional in fields if not optional}
            optional = {name for name, optional in fields if optional}
            for method in re.findall(r"`(\w+)`", cells[1]):
                yield form, method, required, optional


def test_the_table_and_the_paper_agree():
    paper = {(form, method): fields for form, method, *fields in described()}
    table = {
        (row.form, name): [set(row.required), set(row.params) - row.required]
        for rows in (METHODS, NOTICES)
        for name, row in rows.items()
    }
    assert paper == table
