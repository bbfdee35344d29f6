"""Fixtures of the service tests: a container for each module, umad installed as a package would."""

import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.systemd.container import Container, Unavailable, container

PROJECT: Final = Path(__file__).resolve().parents[2]
# Bound there whatever the real place: a unit with User= sees nothing below /root or a private /tmp.
INSIDE: Final = "/srv/umad"
VENV: Final = "/srv/venv"
PYTHON: Final = f"{VENV}/{Path(sys.executable).relative_to(sys.prefix)}"
ENVIRONMENT: Final = f"PYTHONPATH={INSIDE} PYTHONDONTWRITEBYTECODE=1"
PROGRAMS: Final = {
    "umad": "umad.daemon.main",
    "umadctl": "umad.cli.main",
    "umad-serve": "umad.serve.main",
}
# The container cannot set vm.swappiness, so the daemon is started permissive unless a test says so.
PERMISSIVE: Final = """\
[Service]
ExecStart=
ExecStart=/usr/bin/umad --config /etc/umad/umad.toml --permissive
"""


class Installed:
    """A container with umad installed, its units stopped; made anew for each test.

    Attributes:
        machine: the container.
        started_unix_s: when this test began, for the journal.
    """

    def __init__(self, machine: Container) -> None:
        self.machine = machine
        self.started_unix_s = time.time()
        self.run = machine.run
        self._units = ["umad-serve.service", "umad.service", "umad.socket"]

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit for this test."""
        folder = self.machine.path(f"/run/systemd/system/{unit}.d")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(list(folder.iterdir()))}.conf").write_text(text)
        self.run("systemctl daemon-reload")

    def unit(self, name: str, text: str) -> None:
        """Add a unit for this test."""
        self.machine.path(f"/run/systemd/system/{name}").write_text(text)
        self._units.insert(0, name)
        self.run("systemctl daemon-reload")

    def show(self, unit: str, field: str) -> str:
        """One property of a unit."""
        return self.run(f"systemctl show --value -p {field} {unit}").stdout.strip()

    def python(self, script: str, *arguments: str, user: str | None = None) -> str:
        """Run one of this folder's scripts inside; what it printed."""
        command = [PYTHON, f"{INSIDE}/tests/systemd/{script}", *arguments]
        return self.run(f"{ENVIRONMENT} {shlex.join(command)}", user=user).stdout.strip()

    def close(self) -> None:
        """Stop everything and take the test's changes back."""
        units = " ".join(self._units)
        self.run(
            f"systemctl stop {units}; systemctl kill --signal=KILL {units} 2>/dev/null;"
            "rm -rf /run/systemd/system/*; systemctl daemon-reload; systemctl reset-failed"
        )


@pytest.fixture(scope="module")
def machine() -> Iterator[Container]:
    """A running container that sees the project and the virtual environment."""
    try:
        with container({PROJECT: INSIDE, Path(sys.prefix): VENV}) as booted:
            yield booted
    except Unavailable as error:
        _give_up(str(error))


@pytest.fixture(scope="module")
def _package(machine: Container) -> Container:
    """The files of the package in their places, users and folders made."""
    for source in (PROJECT / "systemd").iterdir():
        if source.suffix in (".service", ".socket", ".slice", ".path"):
            machine.path(f"/etc/systemd/system/{source.name}").write_bytes(source.read_bytes())
    for kind in ("sysusers", "tmpfiles"):
        text = (PROJECT / f"systemd/umad.{kind}").read_bytes()
        machine.path(f"/usr/lib/{kind}.d/umad.conf").write_bytes(text)
    machine.path("/etc/umad").mkdir(exist_ok=True)
    shipped = PROJECT / "etc/umad.toml"
    machine.path("/etc/umad/umad.toml").write_text(shipped.read_text() if shipped.exists() else "")
    for program, module in PROGRAMS.items():
        path = machine.path(f"/usr/bin/{program}")
        path.write_text(f'#!/bin/sh\n{ENVIRONMENT} exec {PYTHON} -m {module} "$@"\n')
        path.chmod(0o755)
    machine.run("systemd-sysusers umad.conf && systemd-tmpfiles --create umad.conf")
    machine.run("systemctl daemon-reload")
    usable = machine.run(f"{PYTHON} {INSIDE}/umad/__init__.py", user="umad", check=False)
    if usable.returncode != 0:
        _give_up(
            "the user umad must be able to run the virtual environment and to read the project: "
            "make the environment from /usr/bin/python3, and the folders readable for all\n"
            + usable.stderr
        )
    return machine


@pytest.fixture
def umad(_package: Container) -> Iterator[Installed]:
    """umad installed, permissive, not yet started."""
    installed = Installed(_package)
    installed.drop_in("umad.service", PERMISSIVE)
    yield installed
    installed.close()


def _give_up(reason: str) -> None:
    """No container: a skip on a developer's machine, a failure where all must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
