"""The README is true: its commands run, its example works, it stays one screen."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.running import running

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def test_it_is_one_screen() -> None:
    assert len(README.splitlines()) <= 70


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def _into(folder: Path, words: list[str]) -> list[str]:
    kept = {"snapshot": "kept.tar.gz", "report": "hour.html"}
    return ["-o", str(folder / kept[words[1]])] if words[1] in kept else []


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    """`make run` is run by CI itself; the others here."""
    assert commands() == [
        "make run",
        ".venv/bin/umadctl --socket PATH status",
        "umadctl doctor",
        "umadctl check-config etc/umad.toml",
        "umad up --config FILE",
        "umadctl evict llama",
        "umadctl run --name comfy --quota 20GiB -- CMD",
        "umadctl top",
        "umadctl events",
        "umadctl report",
        "umadctl snapshot",
    ]
    assert shutil.which("make")
    dry = subprocess.run(
        ["make", "--dry-run", "run"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "tests.demo.run" in dry.stdout
    with running(tmp_path) as daemon:
        client = daemon.client()
        client.worker("llama", quota="1MiB", on_evict=print)
        for command in (*commands()[1:4], *commands()[5:]):
            filled = command.replace("PATH", str(daemon.socket)).replace(
                "GiB -- CMD", "MiB -- true"
            )
            words = filled.split()
            done = subprocess.run(
                [BIN / Path(words[0]).name, *words[1:], *_into(tmp_path, words)],
                cwd=ROOT,
                env={**os.environ, "UMAD_SOCKET": str(daemon.socket)},
                check=False,
                timeout=30,
            )
            # 1: the doctor has found something, as on most machines that were not set up.
            assert done.returncode in ({0, 1} if "doctor" in words else {0}), command
        client.close()
    subprocess.run([BIN / "umad", "up", "--help"], check=True, timeout=30)


@pytest.mark.slow
def test_the_example_works(tmp_path: Path) -> None:
    [example] = blocks("python")
    with running(tmp_path) as daemon:
        code = example.replace('"40GiB"', '"64MiB"').replace('"46GiB"', '"80MiB"')
        code = f"class Model:\n    __call__ = print\ndef load_model(): return Model()\n{code}"
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"UMAD_SOCKET": str(daemon.socket), "PATH": "/usr/bin"},
            check=True,
            timeout=30,
        )
        counted = daemon.wait_for("loaded", worker="llama")
        assert counted["booked_bytes"] == 64 << 20
