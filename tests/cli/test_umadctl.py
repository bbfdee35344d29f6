"""umadctl as people run it: against a real daemon, at 80 columns, with its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from tests.daemon.running import ROOT, running
from umad.cli import render


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umad.cli.main", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )


def shown(drive: Drive) -> str:
    """What a terminal of 80 columns shows of an engine's state."""
    daemon = {
        "version": "0.1.0",
        "pid": 1,
        "uptime_s": 75.0,
        "socket": "/run/umad/umad.sock",
        "conservative": False,
        "warnings": ["vm.swappiness: 60; should be 1"],
        "advice": [],
        "permissive": ["all"],
    }
    state = {"daemon": daemon, **drive.engine.status(drive.now_s)}
    for process in state["processes"]:
        process["guard"] = True
    console = Console(width=80, file=None, highlight=False)
    with console.capture() as captured:
        for part in render.status(state):
            console.print(part)
    text = captured.get()
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_an_idle_daemon_says_what_to_do_next() -> None:
    text = shown(Drive(engine()))
    assert "no workers; start umad-serve" in text
    assert "2.0 GiB" in text


def test_workers_processes_and_the_queue_fit_80_columns() -> None:
    drive = Drive(engine())
    drive.loaded(1234567, "a-model-with-a-rather-long-name-70b-q4_k_m", 1500 * MB)
    drive.look({1234567: 1200 * MB})
    drive.connect(8)
    worker = drive.call(8, "register", model="waiting", quota=900 * MB)["worker"]
    drive.ask(8, "reserve", worker=worker, wait_s=60.0)
    drive.now_s += 7.0
    text = shown(drive)
    assert "a-model-with" in text
    assert "memory to load" in text
    assert "7.0 s" in text
    assert "not set up: vm.swappiness" in text


def test_what_programs_call_themselves_is_shown_as_text() -> None:
    drive = Drive(engine())
    drive.connect(7)
    worker = drive.call(7, "register", model="a", quota=MB, guard_off="\x1b[2Jno")["worker"]
    drive.call(7, "reserve", worker=worker)
    drive.tell(7, "progress", worker=worker, stage="\x1b[3J", ratio=0.5)
    [process] = drive.engine.state.processes.values()
    process.comm = "[red]\x1b]0;x\x07"
    drive.look({7: MB})
    text = shown(drive)
    assert "[red]?]0;x?" in text
    assert "?[3J 50%" in text
    assert "?[2Jno" in text


def test_what_is_unknown_is_a_question_mark_and_a_revoked_process_stands_out() -> None:
    drive = Drive(engine())
    drive.loaded(7, "greedy", 100 * MB)
    drive.look({7: 400 * MB}, safe=None)
    text = shown(drive)
    assert "revoked" in text
    assert "?" in text
    assert "garbage" in text


def test_a_load_under_way_shows_how_far_it_is() -> None:
    drive = Drive(engine())
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=100 * MB)["worker"]
    drive.call(7, "reserve", worker=worker)
    drive.tell(7, "progress", worker=worker, stage="reading", ratio=0.42)
    assert "reading 42%" in shown(drive)


@pytest.mark.slow
def test_status_of_a_real_daemon(tmp_path: Path) -> None:
    with running(tmp_path) as daemon, daemon.client() as client:
        client.worker("llama", quota="64MiB")
        table = run("--socket", daemon.socket, "status")
        assert table.returncode == 0, table.stderr
        assert "llama" in table.stdout
        assert all(len(line) <= 80 for line in table.stdout.splitlines())
        state = json.loads(run("--socket", daemon.socket, "status", "--json").stdout)
        assert state["workers"][0]["name"] == "llama"
        assert state["daemon"]["pid"] == daemon.pid


@pytest.mark.slow
def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    done = run("--socket", tmp_path / "none.sock", "status")
    assert done.returncode == 3
    assert "systemctl start umad" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_check_config(tmp_path: Path) -> None:
    good = run("check-config", ROOT / "etc/umad.toml")
    assert (good.returncode, good.stderr) == (0, "")
    bad = tmp_path / "bad.toml"
    bad.write_text('[memory]\nbudget = 12\n[[model]]\nname = "a"\n')
    done = run("check-config", bad)
    assert done.returncode == 78
    assert "line 2: memory.budget = 12" in done.stderr
    assert "model.quota" in done.stderr
    assert run("check-config", tmp_path / "missing.toml").returncode == 78
    assert run("no-such-command").returncode == 2
