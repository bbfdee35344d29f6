"""Prometheus' own judge of texts and rules: this machine's promtool, or Debian's package's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / ".work/prometheus"


def promtool() -> Path:
    """The program; the package's is unpacked once, since its dependencies are not needed.

    Without a network it is a skip on a developer's machine, a failure where all must run.
    """
    found = shutil.which("promtool")
    if found is not None:
        return Path(found)
    program = KEPT / "usr/bin/promtool"
    if program.exists():
        return program
    KEPT.mkdir(parents=True, exist_ok=True)
    unpack = (
        "{ apt-get -qq download prometheus"
        " || { apt-get -qq update && apt-get -qq download prometheus; }; } && "
        "mkdir -p new && dpkg --fsys-tarfile prometheus_*.deb | tar -x -C new ./usr/bin/promtool &&"
        "mv new/usr . && rm -r new prometheus_*.deb"
    )
    done = subprocess.run(
        ["sh", "-c", unpack], cwd=KEPT, capture_output=True, text=True, check=False
    )
    if not program.exists():
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"no promtool, and its package cannot be had: {done.stderr[-300:]}")
    return program


def judge(*arguments: str | Path, text: bytes = b"") -> str:
    """What promtool finds fault with; nothing is right."""
    done = subprocess.run(
        [promtool(), *arguments], input=text, capture_output=True, check=False, timeout=60
    )
    said = (done.stdout + done.stderr).decode()
    # It tells of what is right, too, but for metrics, where a warning is no failure to it.
    return said if done.returncode or arguments[:2] == ("check", "metrics") else ""


def check_metrics(text: bytes) -> str:
    """What ``promtool check metrics`` finds fault with; nothing is right."""
    return judge("check", "metrics", text=text)
