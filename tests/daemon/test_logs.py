"""The daemon's log: a terminal's words, the journal's fields, ids, and repeats."""

import ast
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from logging_journald import JournaldTransport

import umad
from tests.daemon.running import Raw, running
from umad.daemon import logs
from umad.serve import logs as serve_logs

MEAN = "x\x1b[2J\x1b]0;owned\x07\n03:00:00 umad   all is well"
FIELDS = {"timestamp": "03:11:00", "level": "warning"}
SOURCES = Path(umad.__file__).parent
TELLS = {"Event", "event", "_event", "_case_event", "happened", "at_once", "_rest", "spare"}
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}


def test_a_programs_name_is_no_command_to_a_terminal_and_no_line_of_its_own() -> None:
    told = logs._in_words(None, "", {**FIELDS, "event": "stopped", "worker": "a", "comm": MEAN})
    shown = "comm=x?[2J?]0;owned??03:00:00 umad   all is well"
    assert told == f"03:11:00 umad ! stopped a  {shown}"


def test_a_traceback_keeps_its_lines() -> None:
    where = f"Traceback:\n  File\n{MEAN[:2]}"
    told = logs._in_words(None, "", {**FIELDS, "event": "failed", "why": "w", "where": where})
    assert told.splitlines() == ["03:11:00 umad ! failed   why=w", "Traceback:", "  File", "x?"]


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket in journald's place."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(10)
        receiver.bind(str(tmp_path / "journal"))
        monkeypatch.setattr(JournaldTransport, "SOCKET_PATH", tmp_path / "journal")
        yield receiver


@contextmanager
def closing(journal: logs._Journal) -> Iterator[logs._Journal]:
    with journal._transport.socket:
        yield journal


def fields_of(datagram: bytes) -> list[tuple[str, str]]:
    """The native protocol, as journald reads it."""
    found = []
    while datagram:
        line, _, datagram = datagram.partition(b"\n")
        name, sign, value = line.partition(b"=")
        if not sign:
            (length,) = struct.unpack("<Q", datagram[:8])
            value, datagram = datagram[8 : 8 + length], datagram[9 + length :]
        found.append((name.decode(), value.decode()))
    return found


def test_an_event_goes_to_the_journal_with_its_fields(journald: socket.socket) -> None:
    fields = {"event": "exited", "level": "info", "workers": "a,b", "pid": 7, "comm": MEAN}
    with closing(logs._Journal()) as journal, pytest.raises(structlog.DropEvent):
        journal(None, "", fields)
    sent = fields_of(journald.recv(65536))
    assert [value for name, value in sent if name == "UMAD_WORKER"] == ["a", "b"]
    assert {
        ("UMAD_EVENT", "exited"),
        ("UMAD_PID", "7"),
        ("UMAD_COMM", MEAN),  # binary-safe: a line end in a name makes no field
        ("PRIORITY", "6"),
        ("SYSLOG_IDENTIFIER", "umad"),
        ("MESSAGE_ID", logs.MESSAGE_IDS["exited"]),
    } <= set(sent)
    assert not [name for name, _ in sent if not re.fullmatch("[A-Z][A-Z0-9_]{0,63}", name)]


def test_a_journal_that_takes_nothing_costs_no_time_and_gets_it_later(
    journald: socket.socket,
) -> None:
    with closing(logs._Journal()) as journal:

        def tell(event: str) -> None:
            with pytest.raises(structlog.DropEvent):
                journal(None, "", {"event": event, "level": "info", "worker": "a"})

        told = 0
        while not journal._waiting:  # until its queue is full
            tell("left")
            told += 1
        tell("stopped")
        for _ in range(told - 1):
            journald.recv(65536)
        tell("exited")
        events = [dict(fields_of(journald.recv(65536)))["UMAD_EVENT"] for _ in range(3)]
        assert events == ["left", "stopped", "exited"]


def told_in(folder: str) -> set[str]:
    """The names of events in the sources: in the first two places of what tells one."""
    return {
        literal.value
        for path in (SOURCES / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _tells(node.func, folder)
        for argument in node.args[:2]
        for literal in ast.walk(argument)
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
        if literal.value not in LEVELS
    }


def _tells(function: ast.expr, folder: str) -> bool:
    if isinstance(function, ast.Attribute) and function.attr in LEVELS:
        return ast.unparse(function.value) in ("log", "self._log")
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    return name in TELLS and folder != "serve"


def test_every_event_has_an_id_and_every_id_an_event() -> None:
    # Those whose name is chosen where they are told.
    served = told_in("serve") - {"model."} | {"model.waiting", "model.failed"}
    assert served == serve_logs.MESSAGE_IDS.keys()
    told = told_in("core") | told_in("daemon")
    assert told == logs.MESSAGE_IDS.keys()


def test_ids_are_ids_and_no_two_are_equal() -> None:
    ids = [*logs.MESSAGE_IDS.values(), *serve_logs.MESSAGE_IDS.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert logs.MESSAGE_IDS.keys() >= logs.DECISIONS
    assert serve_logs.MESSAGE_IDS.keys() >= serve_logs.DECISIONS


@pytest.mark.slow
def test_a_peer_that_breaks_the_protocol_all_the_time_fills_no_log(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        for _ in range(60):
            with Raw(daemon.socket) as peer:
                peer.socket.sendall(b"\xc1")
                assert peer.closed_within(5)
        counted = daemon.wait_for("protocol_violation", within_s=10)
        daemon.stop()
        lines = [line for line in daemon.log if line["event"] == "protocol_violation"]
        assert sum(line.get("repeated", 1) for line in lines) == 60
        assert len(lines) < 30, counted
