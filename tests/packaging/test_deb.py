"""The Debian package, built and then used in clean systems: a real systemd, no network."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.conftest import NEWER
from tests.packaging.debian import APT, UNITS, journal, show, traces, workers
from tests.packaging.needs import PROJECT, clean_root, give_up, need
from tests.systemd.conftest import PERMISSIVE
from tests.systemd.container import Container, Unavailable, container, wait_until, why_unavailable
from umad import __version__

pytestmark = [pytest.mark.package, pytest.mark.slow, pytest.mark.timeout(1200)]

# Stands for an environment with torch; a worker with memory of its own, as the service's user.
SERVE: Final = """\
#!/bin/sh
PYTHONPATH=/usr/lib/umad exec python3 /srv/scripts/standin.py model 8
"""


@pytest.fixture(params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, packages: Path) -> Iterator[Container]:
    """A clean system that runs."""
    if (reason := why_unavailable()) is not None:
        give_up(reason)
    binds = {packages: "/srv/packages", PROJECT / "tests/systemd": "/srv/scripts"}
    try:
        with container(binds, clean_root(request.param)) as booted:
            yield booted
    except Unavailable as error:
        give_up(str(error))


def test_lintian_has_nothing_to_say(deb: Path) -> None:
    need("lintian", "lintian")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on=error,warning", deb],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def contents(deb: Path) -> str:
    listing = ["dpkg-deb", "--contents", deb]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout


def test_every_library_that_is_carried_has_its_licence_told(deb: Path) -> None:
    told = (PROJECT / "packaging/debian/copyright").read_text()
    carried = re.findall(r"usr/lib/umad/(\w+)-[^/]+\.dist-info/$", contents(deb), re.MULTILINE)
    assert {*carried} == {"umad", *re.findall(r"^Files: lib/(\w+)\*", told, re.MULTILINE)}


def test_what_watches_and_explains_umad_is_in_it(deb: Path) -> None:
    listed = contents(deb)
    homes = {
        "etc/grafana": "usr/share/umad/grafana",
        "etc/prometheus": "usr/share/umad/prometheus",
        "packaging/doc": "usr/share/doc/umad",
    }
    for source, home in homes.items():
        for file in (PROJECT / source).rglob("*"):
            assert f"./{home}/{file.relative_to(PROJECT / source)}" in listed


@pytest.mark.root
@pytest.mark.systemd
def test_from_the_installation_to_the_purge(debian: Container) -> None:
    before = traces(debian)
    _install(debian)
    _start(debian)
    _serve(debian)
    _upgrade(debian)
    _remove(debian)
    debian.run(f"{APT} purge umad")
    assert traces(debian) == before
    assert debian.run("systemctl list-units --all --no-legend 'umad*'").stdout == ""


def _install(debian: Container) -> None:
    debian.run(f"{APT} install /srv/packages/umad.deb", timeout_s=120)
    assert (
        debian.run(f"systemctl is-active {UNITS}", check=False).stdout.split() == ["inactive"] * 4
    )
    enabled = debian.run(f"systemctl is-enabled {UNITS}", check=False).stdout.split()
    assert enabled == ["enabled", "enabled", "enabled", "disabled"]
    assert debian.run("umadctl --version").stdout == f"umadctl, version {__version__}\n"
    libraries = "import sys; sys.path.insert(0, '/usr/lib/umad'); import msgpack, umad"
    compiled = debian.run(
        f'python3 -c "{libraries}; print(msgpack.Packer, umad.__cached__)"'
    ).stdout
    assert "msgpack._cmsgpack.Packer" in compiled
    assert debian.path(compiled.split()[-1]).exists()
    shown = debian.run("journalctl --list-catalog").stdout
    for catalog in (PROJECT / "packaging").glob("*.catalog"):
        ids = re.findall(r"^-- (\w+)", catalog.read_text(), re.MULTILINE)
        assert not [one for one in ids if one not in shown]
    completed = debian.run(
        "bash -c '. /usr/share/bash-completion/completions/umadctl; COMP_WORDS=(umadctl stat);"
        " COMP_CWORD=1; _umadctl_completion umadctl; echo ${COMPREPLY[@]}'"
    )
    assert completed.stdout == "status\n"
    debian.path("/run/up.toml").write_text('[daemon]\nsocket = "/run/up.sock"\n')
    debian.run("systemd-run --quiet --unit=up umad up --config /run/up.toml")
    status = "umadctl --socket /run/up.sock status"
    wait_until(lambda: debian.run(status, check=False).returncode == 0, 20, "umad up")
    debian.run("systemctl stop up; rm /run/up.*")


def _start(debian: Container) -> None:
    debian.run("sed -i 's/^#interval = .*/interval = \"100ms\"/' /etc/umad/umad.toml")
    # The container cannot set what the package asks for; its first start says so.
    assert debian.run("systemctl start umad", check=False).returncode != 0
    assert "sysctl -w vm.swappiness=1" in journal(debian, "-u umad")
    debian.run("mkdir -p /run/systemd/system/umad.service.d")
    debian.path("/run/systemd/system/umad.service.d/test.conf").write_text(PERMISSIVE)
    debian.run("systemctl daemon-reload; systemctl start umad")
    assert "pool" in debian.run("umadctl status").stdout.lower()
    assert workers(debian) == []


def _serve(debian: Container) -> None:
    assert debian.run("systemctl start umad-serve", check=False).returncode != 0
    assert show(debian, "umad-serve", "ExecMainStatus") == "78"
    assert show(debian, "umad-serve", "NRestarts") == "0"
    recipe = re.search(r'pip install "(/.+\.whl)\[serve\]"', journal(debian, "-u umad-serve"))
    assert recipe is not None
    assert debian.path(recipe[1]).exists()
    debian.run("mkdir -p /opt/umad-serve/bin")
    program = debian.path("/opt/umad-serve/bin/umad-serve")
    program.write_text(SERVE)
    program.chmod(0o755)
    debian.run("systemctl start umad-serve")
    assert "holds another version" in journal(debian, "-u umad-serve")
    assert workers(debian) == [("model", int(show(debian, "umad-serve", "MainPID")), "ready")]


def _upgrade(debian: Container) -> None:
    daemon, serve = (show(debian, unit, "MainPID") for unit in ("umad", "umad-serve"))
    before = workers(debian)
    debian.run(f"{APT} install /srv/packages/newer.deb", timeout_s=120)
    assert debian.run("umadctl --version").stdout == f"umadctl, version {NEWER}\n"
    assert show(debian, "umad", "MainPID") not in (daemon, "0")
    assert show(debian, "umad-serve", "MainPID") == serve
    wait_until(lambda: workers(debian) == before, 10, "the worker's return")
    assert 'interval = "100ms"' in debian.path("/etc/umad/umad.toml").read_text().splitlines()


def _remove(debian: Container) -> None:
    debian.run("rm -r /opt/umad-serve /run/systemd/system/umad.service.d")  # not the package's
    debian.run(f"{APT} remove umad")
    assert set(debian.run(f"systemctl is-active {UNITS}", check=False).stdout.split()) == {
        "inactive"
    }
    assert debian.path("/etc/umad/umad.toml").exists()
    assert not debian.path("/usr/lib/umad").exists()
