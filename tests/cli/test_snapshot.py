"""``umadctl snapshot`` as people run it."""

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.daemon.running import Daemon, running
from umad.cli.main import cli
from umad.cli.snapshot import default_name
from umad.host import archive


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def listed(source: Path) -> dict[str, bytes]:
    with tarfile.open(source) as made:
        files = {one.name.partition("/")[2]: made.extractfile(one) for one in made}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_without_a_daemon_there_are_the_readings_and_it_says_so(tmp_path: Path) -> None:
    target = tmp_path / "report.tar.gz"
    result = run("--socket", tmp_path / "none.sock", "snapshot", "-o", target)
    assert result.exit_code == 0
    assert "no books and no decisions: no umad daemon answers" in result.output
    assert f"umad --replay {target}" in result.output
    assert "Look through it before you attach it" in result.output
    assert all(len(line) <= 80 or str(target) in line for line in result.output.splitlines())
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    files = listed(target)
    assert "no umad daemon" in json.loads(files[archive.ABOUT])["no_daemon"]
    assert files["tree/proc/meminfo"].startswith(b"MemTotal")
    assert archive.RECORDING not in files


def test_nothing_is_overwritten_and_nothing_left_half_done(tmp_path: Path) -> None:
    target = tmp_path / "report.tar.gz"
    target.write_text("precious")
    words = ("--socket", tmp_path / "none.sock", "snapshot", "-o")
    result = run(*words, target)
    assert result.exit_code == 2
    assert "is there already" in result.output
    assert target.read_text() == "precious"
    nowhere = run(*words, tmp_path / "no" / "report.tar.gz")
    assert nowhere.exit_code == 2
    assert "cannot write" in nowhere.output
    with pytest.raises(ValueError, match="half"):
        archive.pack(tmp_path / "half.tar.gz", "a", failing())
    assert sorted(tmp_path.iterdir()) == [target]


def failing():
    yield "about.json", b"{}"
    raise ValueError("half")


def test_the_name_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "../../évil host")
    name = default_name()
    assert name.startswith("umad-snapshot-vil-host-20")
    assert "/" not in name


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("d")) as made:
        yield made


@pytest.mark.slow
def test_with_a_daemon_it_holds_books_events_and_the_last_minute(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMAD_TEST_SECRET", "hunter2")
    target = tmp_path / "report.tar.gz"
    with daemon.client("alice's notebook") as client:
        client.worker("llama", quota="64MiB")
        result = run("--socket", daemon.socket, "snapshot", "-o", target)
    assert result.exit_code == 0, result.output
    assert "its registered processes (1)" in result.output
    files = listed(target)
    assert json.loads(files[archive.STATUS])["workers"][0]["name"] == "llama"
    assert json.loads(files[archive.EVENTS])["events"][-1]["name"] == "registered"
    lines = [json.loads(line) for line in files[archive.RECORDING].splitlines()]
    methods = [line["given"]["method"] for line in lines if line.get("input") == "request"]
    assert methods == ["register"]
    assert f"tree/proc/{os.getpid()}/status" in files
    everything = b"".join(files.values())
    assert b"hunter2" not in everything
    assert b"alice" not in everything
