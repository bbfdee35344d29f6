"""Prometheus' own judge of a text: the promtool of this machine, or of Debian's package."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(folder: Path) -> Path:
    """The program; the package's is unpacked in ``folder``, since its dependencies are not needed.

    Without a network it is a skip on a developer's machine, a failure where all must run.
    """
    found = shutil.which("promtool")
    if found is not None:
        return Path(found)
    unpack = (
        "{ apt-get -qq download prometheus"
        " || { apt-get -qq update && apt-get -qq download prometheus; }; } && "
        "dpkg --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool"
    )
    done = subprocess.run(
        ["sh", "-c", unpack], cwd=folder, capture_output=True, text=True, check=False
    )
    program = folder / "usr/bin/promtool"
    if not program.exists():
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"no promtool, and its package cannot be had: {done.stderr[-300:]}")
    return program


def check_metrics(program: Path, text: bytes) -> str:
    """What ``promtool check metrics`` finds fault with; nothing is right."""
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, check=False
    )
    return (done.stdout + done.stderr).decode()
