"""The journal's catalogue: an entry for every id, that systemd reads and that says what to do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.commands import problem_of
from umad.daemon import logs
from umad.serve import logs as serve_logs

CATALOG = Path(__file__).parents[2] / "packaging/umad.catalog"
IDS = {**logs.MESSAGE_IDS, **serve_logs.MESSAGE_IDS}
ENTRIES = {
    found["id"]: found
    for found in re.finditer(
        r"^# (?P<name>\S+)\n-- (?P<id>[0-9a-f]{32})\nSubject: (?P<subject>.+)\n"
        r"Defined-By: umad\nDocumentation: (?P<page>.+)\n\n(?P<text>(?:.*\n)+?)(?=\n# |\Z)",
        CATALOG.read_text(),
        re.MULTILINE,
    )
}


def test_every_id_has_an_entry_under_its_name_and_every_entry_an_id() -> None:
    assert {found["name"]: key for key, found in ENTRIES.items()} == IDS
    assert CATALOG.read_text().count("\n-- ") == len(IDS)


@pytest.mark.parametrize("key", IDS.values(), ids=IDS.keys())
def test_it_says_what_happened_what_umad_does_and_what_you_can_do(key: str) -> None:
    entry = ENTRIES[key]
    *_, you_can = paragraphs = re.split(r"\n\n", entry["text"].strip())
    assert len(paragraphs) == 3
    commands = re.findall(r"^    (.+)$", you_can, re.MULTILINE)
    assert commands, "no command that shows more"
    for command in commands:
        assert problem_of(command) is None
    page = "umad-serve(8)" if key in serve_logs.MESSAGE_IDS.values() else "umad(8)"
    assert entry["page"] == f"man:{page}"
    fields = re.findall(r"@([^@\s]+)@", entry["subject"] + entry["text"])
    assert all(re.fullmatch(r"UMAD_[A-Z_]+", field) for field in fields)


def test_systemd_takes_it(tmp_path: Path) -> None:
    journalctl = shutil.which("journalctl")
    if journalctl is None:
        pytest.skip("journalctl not found: apt-get install systemd")
    folder = tmp_path / "usr/lib/systemd/catalog"
    folder.mkdir(parents=True)
    shutil.copy(CATALOG, folder)

    def run(*options: str) -> str:
        command = [journalctl, f"--root={tmp_path}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        assert not done.stderr
        return done.stdout

    run("--update-catalog")
    listed = run("--list-catalog")
    assert {line.split()[0] for line in listed.splitlines()} == set(IDS.values())
    shown = run("--dump-catalog", IDS["stopped"])
    assert "Subject: @UMAD_WORKER@ was stopped" in shown
    assert "    umadctl snapshot" in shown
