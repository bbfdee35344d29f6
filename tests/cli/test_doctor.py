"""umadctl doctor: without a daemon and with one, at 80 columns, with its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.daemon.running import ROOT, running
from tests.data.machine_tree import lay_out
from umad.cli.main import cli


def doctor(*words: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, words)])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = lay_out("strix-halo-128g", tmp_path / "machine")
    for place, text in (
        ("proc/sys/vm/swappiness", "1\n"),
        ("proc/sys/vm/vfs_cache_pressure", "50\n"),
        ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
    ):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text)
    return root


def assert_readable(text: str) -> None:
    for line in text.splitlines():
        assert len(line) <= 80 or "now " in line or "for good" in line or ">>" in line, line


def test_a_machine_that_is_set_up(tree: Path) -> None:
    done = doctor("--root", tree)
    assert done.exit_code == 0
    assert_readable(done.output)
    assert done.output.startswith("Kernel\n  ok      vm.swappiness           1\n")
    assert "GPU\n  ok      gpu.device              0000:c5:00.0, amd-apu\n" in done.output
    assert "umad can start; 2 advised." in done.output


def test_a_machine_that_is_not(tree: Path) -> None:
    (tree / "proc/sys/vm/swappiness").write_text("60\n")
    done = doctor("--root", tree)
    assert done.exit_code == 1
    assert_readable(done.output)
    assert "  HARD    vm.swappiness           60; should be 1\n" in done.output
    assert "          now       sysctl -w vm.swappiness=1\n" in done.output
    assert "1 to mend before umad starts, 2 advised." in done.output
    assert "To start all the same: umad --permissive=vm.swappiness\n" in done.output


def test_what_programs_get(tree: Path) -> None:
    (tree / "proc/sys/vm/swappiness").write_text("60\n")
    done = doctor("--json", "--root", tree)
    assert done.exit_code == 1
    report = json.loads(done.output)
    assert (report["hard"], report["advice"], report["daemon"]) == (1, 2, None)
    first = report["findings"][0]
    assert (first["name"], first["severity"], first["found"]) == ("vm.swappiness", "hard", "60")
    assert first["should"] == "1"
    assert first["fix_now"] == "sysctl -w vm.swappiness=1"
    assert first["keep"] == {
        "path": "/etc/sysctl.d/99-umad.conf",
        "line": "vm.swappiness = 1",
        "section": "",
    }


def test_the_configuration_counts(tree: Path, tmp_path: Path) -> None:
    config = tmp_path / "umad.toml"
    config.write_text("[memory]\nconservative = true\n")
    done = doctor("--root", tree, "--config", config)
    assert done.exit_code == 0
    assert "conservative mode, though 124.9 GiB are the" in done.output
    config.write_text("[memory]\nconservative = 1\n")
    done = doctor("--root", tree, "--config", config)
    assert done.exit_code == 1
    assert "Configuration\n  HARD    config.file" in done.output
    assert f"umadctl check-config {config}" in done.output
    assert "vm.swappiness" in done.output  # and all the rest is judged, too


@pytest.mark.slow
def test_what_a_daemon_runs_with(tmp_path: Path) -> None:
    with running(tmp_path, "conservative = true") as daemon:
        done = CliRunner().invoke(cli, ["--socket", str(daemon.socket), "doctor"])
        assert_readable(done.output)
        assert f"runs (pid {daemon.pid})" in done.output
        assert "permissive (all): it started in spite of" in done.output
        assert "conservative mode: half of the memory may be booked" in done.output
        assert "looks at memory every" in done.output
        asked = CliRunner().invoke(cli, ["--socket", str(daemon.socket), "doctor", "--json"])
        report = json.loads(asked.output)
        assert report["daemon"]["pid"] == daemon.pid
        assert report["daemon"]["permissive"] == ["all"]
        shown = CliRunner().invoke(cli, ["--socket", str(daemon.socket), "status"])
        assert "conservative mode" in shown.output


@pytest.mark.slow
def test_as_a_program_it_ends_with_its_code(tree: Path) -> None:
    (tree / "proc/sys/vm/swappiness").write_text("60\n")
    command = [sys.executable, "-m", "umad.cli.main", "--socket", str(tree / "none"), "doctor"]
    done = subprocess.run(
        [*command, "--root", str(tree)], cwd=ROOT, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (1, b"")
