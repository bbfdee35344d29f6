"""umad-serve's log in the journal: its fields, its repeats, and not a word of a request."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from umad.serve.logs import MESSAGE_IDS

PROGRAM = """
import logging, pathlib, sys
from logging_journald import JournaldTransport
JournaldTransport.SOCKET_PATH = pathlib.Path(sys.argv[1])
import structlog
from umad.serve import logs
logs.configure("journal", "umad-engine")
transport = logging.getLogger().handlers[0].formatter.processors[-1]._transport
transport.socket.setblocking(True)  # or a slow reader loses some
log = structlog.get_logger()
for _ in range(40):
    log.warning("model.quota_refused", model="llama", reason="too large")
    log.info("zygote.forked", model="llama", instance=0, pid=1)
try:
    raise ValueError("my secret prompt")
except ValueError:
    log.exception("child.failed", model="llama", instance=1)
    logging.getLogger("transformers").exception("a_library's %s", "word")
"""


@pytest.mark.slow
def test_events_repeats_and_libraries_in_the_journal(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        journald.settimeout(0.2)
        program = [sys.executable, "-c", PROGRAM, str(tmp_path / "journal")]
        sent = []
        with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None or sent[-1:] != [b""]:
                try:
                    sent.append(journald.recv(65536))
                except TimeoutError:
                    sent.append(b"")
            assert process.stderr is not None
            assert process.stderr.read() == ""
    entries = [one.decode() for one in sent if one]
    refused = [one for one in entries if "UMAD_EVENT=model.quota_refused\n" in one]
    counts = [line for line in "".join(refused).splitlines() if "UMAD_REPEATED=" in line]
    assert len(refused) == 6
    assert counts == ["UMAD_REPEATED=35"]
    for line in (
        "SYSLOG_IDENTIFIER=umad-engine",
        "UMAD_WORKER=llama",
        "UMAD_MODEL=llama",
        "PRIORITY=4",
        f"MESSAGE_ID={MESSAGE_IDS['model.quota_refused']}",
    ):
        assert line in refused[0].splitlines()
    assert len([one for one in entries if "UMAD_EVENT=zygote.forked\n" in one]) == 40
    (failed,) = [one for one in entries if "UMAD_EVENT=child.failed\n" in one]
    assert "UMAD_EXCEPTION=ValueError at <string>:" in failed
    (library,) = [one for one in entries if "UMAD_EVENT=library\n" in one]
    assert "UMAD_TEXT=a_library's word\n" in library
    assert "MESSAGE_ID" not in library
    assert "secret" not in "".join(entries)
