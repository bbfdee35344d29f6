"""A snapshot of a real daemon replayed, and archives that nobody should have written."""

import gzip
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core import fakes
from tests.core.drive import Drive
from tests.daemon.running import ROOT, Daemon, Raw, running
from umad.client import QuotaDenied
from umad.core.access import Access
from umad.core.tape import RecordedEngine
from umad.daemon.main import main
from umad.daemon.recording import PART_BYTES, Recording
from umad.errors import InvalidParams, Overloaded
from umad.host import archive
from umad.units import MIB

GREEDY = [sys.executable, "-m", "tests.demo.greedy"]
ABOUT = {"umad": "0.1.0", "taken_unix_s": 1.8e9, "system": "Linux 6.12 x86_64", "page_bytes": 4096}
STATUS = {
    "daemon": {
        "version": "0.1.0",
        "uptime_s": 75.0,
        "warnings": ["vm.swappiness: 60; should be 1"],
        "advice": [],
        "permissive": ["all"],
    }
}


def taken(daemon: Daemon, target: Path) -> Path:
    """What a person runs."""
    command = [sys.executable, "-m", "umad.cli.main", "--socket", str(daemon.socket), "snapshot"]
    subprocess.run([*command, "-o", str(target)], cwd=ROOT, check=True, capture_output=True)
    return target


def shown(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``umad --replay`` prints, which ends well and fits a terminal."""
    assert main(["--replay", str(source)]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def as_one_line(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------- a real daemon


@pytest.mark.slow
def test_a_breach_and_a_refusal_are_decided_again_as_they_were(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(folder) as daemon, daemon.client() as client:
        client.worker("holder", quota="1900MiB").load(object)
        with pytest.raises(QuotaDenied, match="bound by budget"):
            client.worker("late", quota="500MiB").load(object, wait_s=0)
        greedy = subprocess.Popen([*GREEDY, str(daemon.socket), "128MiB", "4GiB"], cwd=ROOT)
        stopped = daemon.wait_for("stopped", pid=greedy.pid)
        greedy.wait(10)
        source = taken(daemon, folder / "report.tar.gz")
    text = shown(source, capsys)
    line = as_one_line(text)
    assert "refused, quota_denied: no idle model can make room: 500.0 MiB asked of " in line
    assert "pool 'system', 148.0 MiB free (bound by budget); held by holder 1.9 GiB" in line
    assert "revoke greedy: quota_exceeded: the process holds" in line
    assert f"SIGKILL to process {greedy.pid}: quota_exceeded" in line
    assert f"event stopped: worker=greedy, pid={greedy.pid}" in line
    assert f"measured_at_kill={stopped['measured_at_kill_bytes'] / MIB:.1f} MiB" in line
    assert "memory.budget = 2.0 GiB" in text
    assert "decides what the daemon decided" in line
    assert "The books at the end are the daemon's." in text
    assert "!" not in text


@pytest.mark.slow
def test_parts_follow_each_other_and_one_reads_at_a_time(daemon: Daemon) -> None:
    with Raw(daemon.socket) as first, Raw(daemon.socket) as second:
        for number in range(100):
            first.call("register", model=f"m{number}", quota=MIB)
        assert not first.call("snapshot")["last"]
        assert second.call("snapshot")["code"] == "overloaded"
        assert second.call("snapshot", part=1)["code"] == "invalid_params"
        assert first.call("snapshot", part=2)["code"] == "invalid_params"
        assert len(first.call("snapshot", part=1)["data"]) == PART_BYTES
        first.close()
        lines, part = b"", 0
        while not (answer := second.call("snapshot", part=part))["last"] or not part:
            lines, part = lines + answer["data"], part + 1
        records = [json.loads(line) for line in (lines + answer["data"]).splitlines()]
        assert records[0]["format"] == 1
        assert "start" in records[1]
        assert "end" in records[-1]


# --------------------------------------------------------------- recordings


def engine() -> RecordedEngine:
    made = RecordedEngine(
        fakes.settings(),
        Access(uid=990, worker_gid=50, admin_gid=60),
        generation=1,
        recovering_until_s=0.0,
        unix_offset_s=1.8e9,
    )
    made.observe(fakes.snapshot(0.0), 0.0)
    return made


def recording(made: RecordedEngine) -> list[dict[str, Any]]:
    """As the daemon hands it out, line by line."""
    lines, part, reader = b"", 0, Recording(made.tape)
    while True:
        answer = reader.part(1, part, 0.0)
        lines, part = lines + bytes(answer["data"]), part + 1  # type: ignore[arg-type]
        if answer["last"]:
            return [json.loads(line) for line in lines.splitlines()]


def breach() -> list[dict[str, Any]]:
    drive = Drive(engine())
    drive.connect(7)
    drive.loaded(7, "greedy", 100 * MIB)
    drive.refused(7, "admit", worker=1, bytes=3 << 30)
    drive.look({7: 400 * MIB})
    drive.now_s += 0.06
    drive.look({7: 400 * MIB})
    drive.engine.kill_sent(fakes.identity(7), drive.now_s)
    drive.exit(7)
    assert isinstance(drive.engine, RecordedEngine)
    return recording(drive.engine)


def packed(target: Path, lines: list[Any], **more: Any) -> Path:
    files = {
        archive.ABOUT: json.dumps(ABOUT | more).encode(),
        archive.STATUS: json.dumps(STATUS).encode(),
        archive.RECORDING: b"".join(json.dumps(line).encode() + b"\n" for line in lines),
        "tree/proc/meminfo": Path("/proc/meminfo").read_bytes(),
    }
    archive.pack(target, "umad-snapshot", files.items())
    return target


def test_a_decision_that_is_another_now_is_shown_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = breach()
    kill = next(one for one in lines if any(deed["do"] == "Kill" for deed in one.get("did", ())))
    kill["did"] = [deed for deed in kill["did"] if deed["do"] != "Kill"]
    lines[-1]["end"]["leases"] = [{"id": 1}]
    text = shown(packed(tmp_path / "a.tar.gz", lines, page_bytes=65536), capsys)
    assert "!   umad now: SIGKILL to process 7: quota_exceeded" in text
    assert "!   the daemon then: nothing" in text
    line = as_one_line(text)
    assert "this umad decides otherwise in 1 of " in line
    assert "The books at the end are not the daemon's: leases." in line
    assert "pages have 65536 bytes" in line
    assert "not set up: vm.swappiness: 60; should be 1" in line


def test_without_a_daemon_or_with_too_many_workers_there_are_the_readings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unread = {"proc/7/smaps_rollup": "Permission denied"}
    alone = packed(tmp_path / "a.tar.gz", [], no_daemon="nobody answers", unreadable=unread)
    text = shown(alone, capsys)
    assert "pool system: " in text
    assert "No books and no decisions: nobody answers" in text
    assert "not readable when it was taken: proc/7/smaps_rollup: Permission denied" in text
    busy = packed(tmp_path / "b.tar.gz", [{"format": 1}])
    assert "too many workers to record them" in shown(busy, capsys)


def test_names_do_not_speak_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(breach()).replace("program7", "\\u001b[2J\\u202eevil")
    text = shown(packed(tmp_path / "a.tar.gz", json.loads(text)), capsys)
    assert "?[2J?evil" in text


Change = Callable[[list[Any]], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines.clear(),
        lambda lines: lines[0].update(format=2),
        lambda lines: lines.__setitem__(3, 5),
        lambda lines: lines.pop(),
        lambda lines: lines[1]["start"].update(members=[]) or lines[1]["start"].update(leases=1),
        lambda lines: lines.insert(2, {"input": "status", "given": {}, "did": []}),
        lambda lines: lines.insert(2, {"input": "advance", "given": {"now_s": float("nan")}}),
        lambda lines: lines.insert(2, {"input": "disconnected", "given": {}, "did": []}),
        lambda lines: lines[2]["given"]["snapshot"]["pools"]["system"].update(parent="system"),
        lambda lines: lines[4]["given"].update(now_s=1e300),
        lambda lines: lines[4].update(given={}),
        lambda lines: lines[4]["given"]["params"].update(quota=True),
    ],
)
def test_a_recording_that_contradicts_itself_ends_with_65(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Change
) -> None:
    lines = breach()
    change(lines)
    assert main(["--replay", str(packed(tmp_path / "a.tar.gz", lines))]) == 65
    assert "contradicts itself" in capfd.readouterr().err


def test_a_recording_without_end_is_not_played_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umad.daemon.replay.INPUTS_MAX", 5)
    assert main(["--replay", str(packed(tmp_path / "a.tar.gz", breach()))]) == 65
    assert "more than 5 inputs" in capfd.readouterr().err


# ------------------------------------------------------------------ archives


SPARSE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 34)}


def member(name: str, data: bytes = b"x", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(data)
    for key, value in more.items():
        setattr(made, key, value)
    return made, data


def tarred(target: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    about = member("a/about.json", json.dumps(ABOUT | {"no_daemon": "none"}).encode())
    blocks = [
        info.tobuf(tarfile.PAX_FORMAT if info.pax_headers else tarfile.GNU_FORMAT)
        + data
        + bytes(-len(data) % 512)
        for info, data in (about, *members)
    ]
    target.write_bytes(gzip.compress(b"".join(blocks) + bytes(1024)))
    return target


@pytest.mark.parametrize(
    "bad",
    [
        member("a/../../evil"),
        member("/etc/evil"),
        member("a/tree/proc/../../../evil"),
        member("a/tree/proc/.hidden"),
        member("a/tree/etc/passwd"),
        member("a/tree/proc/" + "x/" * 40 + "x"),
        member("evil"),
        member("a/tree/proc/link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("a/tree/proc/link", b"", type=tarfile.LNKTYPE, linkname="a/about.json"),
        member("a/tree/proc/fifo", b"", type=tarfile.FIFOTYPE),
        member("a/tree/proc/disk", b"", type=tarfile.BLKTYPE),
        member("a/tree/proc/huge", b"", size=1 << 50),
        member("a/about.json", b"{}"),
        member("a/about.json/x"),
        member("a/tree/proc/huge", b"", size=-512),
        member("a/tree/proc/sparse", b"", type=tarfile.GNUTYPE_SPARSE, size=1 << 50),
        member("a/tree/proc/sparse", pax_headers=SPARSE),
    ],
    ids=lambda bad: f"{bad[0].name[:30]}-{bad[0].type!r}",
)
def test_an_archive_that_would_lead_astray_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bad: tuple[tarfile.TarInfo, bytes]
) -> None:
    source = tarred(tmp_path / "bad.tar.gz", bad)
    before = sorted(tmp_path.iterdir())
    assert main(["--replay", str(source)]) == 65
    assert str(source) in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_an_archive_that_is_none_or_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = packed(tmp_path / "good.tar.gz", breach())
    whole = good.read_bytes()

    def code(data: bytes) -> int:
        source = tmp_path / "given"
        source.write_bytes(data)
        return main(["--replay", str(source)])

    assert code(b"") == 65
    assert code(b"no archive") == 65
    assert code(whole[: len(whole) // 2]) == 65
    assert code(gzip.compress(b"no tar" * 1000)) == 65
    assert code(gzip.compress(gzip.decompress(whole)[:700])) == 65
    assert main(["--replay", str(tmp_path / "nowhere")]) == 65
    assert main(["--replay", str(tmp_path)]) == 65
    empty = tmp_path / "empty.tar.gz"
    archive.pack(empty, "a", [])
    assert main(["--replay", str(empty)]) == 65
    deep = tmp_path / "deep.tar.gz"
    archive.pack(deep, "a", [(archive.ABOUT, b"[" * 100_000)])
    assert main(["--replay", str(deep)]) == 65
    for limit, value in (("BYTES_MAX", 5000), ("PACKED_BYTES_MAX", 500), ("FILES_MAX", 2)):
        with monkeypatch.context() as patched:
            patched.setattr(archive, limit, value)
            assert main(["--replay", str(good)]) == 65


def test_a_reader_that_does_not_go_on_holds_nobody_up() -> None:
    reader = Recording(engine().tape)
    many = engine()
    for number in range(400):
        many.connected(number, fakes.peer(number))
    reader = Recording(many.tape)
    assert not reader.part(1, 0, now_s=10.0)["last"]
    with pytest.raises(Overloaded):
        reader.part(2, 0, now_s=14.0)
    assert not reader.part(1, 0, now_s=14.0)["last"]
    assert not reader.part(2, 0, now_s=19.1)["last"]
    with pytest.raises(InvalidParams):
        reader.part(1, 1, now_s=19.2)
