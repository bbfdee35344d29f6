"""An administrator's first hour: the package, a real torch, five models, and one that is greedy.

Everything runs from what the package installed; of the project the container sees only the tests.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.demo.run import GREED, GREEDY_QUOTA, KINDS, QUOTAS
from tests.packaging.conftest import NEWER
from tests.packaging.debian import APT, journal, show, traces, workers
from tests.packaging.needs import PROJECT, clean_root, give_up
from tests.systemd.conftest import PERMISSIVE
from tests.systemd.container import Container, Unavailable, container, wait_until, why_unavailable
from umad.units import format_bytes, parse_bytes

pytestmark = [
    pytest.mark.package,
    pytest.mark.slow,
    pytest.mark.models,
    pytest.mark.systemd,
    pytest.mark.root,
    pytest.mark.timeout(1200),
]

# Torch is not in Debian's root: it comes from this environment, which fits one Python only.
SUITES: Final = {(3, 11): "bookworm", (3, 13): "trixie"}
LIBRARIES: Final = "/srv/libraries"
CHECKPOINTS: Final = "/srv/models"
VENV: Final = "/opt/umad-serve"
WITH_PACKAGE: Final = "PYTHONPATH=/usr/lib/umad:/srv/story exec python3 -m"


@pytest.fixture
def debian(packages: Path) -> Iterator[Container]:
    """A clean system that runs, with the checkpoints of the demonstration."""
    if (reason := why_unavailable()) is not None:
        give_up(reason)
    suite = SUITES.get(sys.version_info[:2])
    if suite is None:
        give_up("torch is here for a Python of no Debian: make setup with python3.11 or python3.13")
    checkpoints = PROJECT / ".work/checkpoints"
    make = [sys.executable, PROJECT / "tests/demo/checkpoints.py", checkpoints]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    binds = {
        packages: "/srv/packages",
        PROJECT / "tests": "/srv/story/tests",
        checkpoints: CHECKPOINTS,
        Path(pytest.__file__).parents[1]: LIBRARIES,
    }
    try:
        with container(binds, clean_root(suite)) as booted:
            yield booted
    except Unavailable as error:
        give_up(str(error))


def test_five_models_and_a_greedy_one(debian: Container) -> None:
    before = traces(debian)
    debian.run(f"{APT} install /srv/packages/umad.deb", timeout_s=120)
    _bring_torch(debian)
    _edit(debian)
    _start(debian)
    with busy(debian):
        _be_greedy(debian)
    with busy(debian):
        _upgrade(debian)
    _read_the_journal(debian)
    _purge(debian)
    assert traces(debian) == before


@contextmanager
def busy(debian: Container) -> Iterator[None]:
    """All five answer before, all the while and after."""
    command = debian.argv(f"{WITH_PACKAGE} tests.packaging.traffic 127.0.0.1:8600")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "each has answered\n"
        yield
        told, _ = asking.communicate(timeout=180)
    assert json.loads(told) == []


def events(debian: Container, search: str) -> list[dict[str, Any]]:
    """What ``journalctl`` shows for these arguments, without systemd's own lines."""
    entries = map(json.loads, journal(debian, f"-o json {search}").splitlines())
    return [entry for entry in entries if "UMAD_EVENT" in entry]


def _bring_torch(debian: Container) -> None:
    """As umad-serve(8) says, but for the network: the libraries are there already."""
    site = f"{VENV}/lib/python3.{sys.version_info.minor}/site-packages"
    debian.run(f"python3 -m venv --without-pip {VENV} && echo {LIBRARIES} > {site}/libraries.pth")
    # One of the libraries is the project itself, in place of which the package's wheel is wanted.
    debian.run(
        f"{VENV}/bin/python -m pip install --no-index --no-deps --ignore-installed"
        " /usr/share/umad/umad-*.whl",
        timeout_s=120,
    )
    found = debian.run(f"{VENV}/bin/python -c 'import umad; print(umad.__file__)'").stdout
    assert found == f"{site}/umad/__init__.py\n"


def _edit(debian: Container) -> None:
    file = debian.path("/etc/umad/umad.toml")
    text = file.read_text()
    for was, new in {
        '#reserve = "auto"': 'reserve = "512MiB"',
        '#budget = "auto"': 'budget = "3GiB"',
        '#runtime_quota = "2GiB"': 'runtime_quota = "1GiB"',
    }.items():
        assert text.count(was) == 1
        text = text.replace(was, new)
    models = (
        f'[[model]]\nname = "{name}"\nkind = "{kind}"\n'
        f'path = "{CHECKPOINTS}/{name}"\nquota = "{QUOTAS[name]}"\n'
        for name, kind in KINDS.items()
    )
    file.write_text(text + "".join(models))
    debian.run("umadctl check-config /etc/umad/umad.toml")


def _start(debian: Container) -> None:
    # Here nothing may set the kernel's parameters, which umad asks for.
    drop_in = debian.path("/run/systemd/system/umad.service.d/test.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(PERMISSIVE)
    debian.run("systemctl daemon-reload; systemctl start umad")
    assert workers(debian) == []
    debian.run("systemctl start umad-serve", timeout_s=120)
    status = "5/5 models ready"
    wait_until(lambda: show(debian, "umad-serve", "StatusText") == status, 300, status)
    shown = debian.run("umadctl status").stdout
    assert {*re.findall(r"^(\w+) +ready ", shown, re.MULTILINE)} == {"runtime", *KINDS}
    assert len({pid for _, pid, _ in workers(debian)}) == 1  # one engine holds them all


def _be_greedy(debian: Container) -> None:
    """By another user's program; the journal says what became of it, by its name."""
    debian.run("useradd --groups umad somebody")
    command = f"{WITH_PACKAGE} tests.demo.greedy /run/umad/umad.sock {GREEDY_QUOTA} {GREED}"
    greedy = debian.run(command, user="somebody", check=False, timeout_s=120)
    assert greedy.returncode == -signal.SIGKILL, greedy
    search = "-u umad UMAD_WORKER=greedy"
    wait_until(lambda: "stopped: " in journal(debian, search), 20, "the end of the story")
    told = events(debian, search)
    assert [one["UMAD_EVENT"] for one in told] == ["registered", "loaded", "revoked", "stopped"]
    quota = parse_bytes(GREEDY_QUOTA)
    _, loaded, revoked, stopped = told
    assert quota / 2 <= int(loaded["UMAD_MEASURED_BYTES"]) <= quota
    limit, measured = (int(revoked[f"UMAD_{key}_BYTES"]) for key in ("LIMIT", "MEASURED"))
    assert quota <= limit < measured
    assert f"limit={format_bytes(limit)}  measured={format_bytes(measured)}" in revoked["MESSAGE"]
    assert stopped["UMAD_FENCE"] == "sigkill"
    assert int(stopped["UMAD_FREED_BYTES"]) == quota
    assert 0 < float(stopped["UMAD_SEEN_TO_KILL_S"]) < float(stopped["UMAD_SEEN_TO_GONE_S"])
    explained = debian.run(f"journalctl -x {search} UMAD_EVENT=stopped").stdout
    assert re.search(r"Subject: .*greedy", explained), explained


def _upgrade(debian: Container) -> None:
    daemon, serve = (show(debian, unit, "MainPID") for unit in ("umad", "umad-serve"))
    ready = [(name, pid, "ready") for name, pid, _ in workers(debian)]
    debian.run(f"{APT} install /srv/packages/newer.deb", timeout_s=120)
    assert debian.run("umadctl --version").stdout == f"umadctl, version {NEWER}\n"
    assert show(debian, "umad", "MainPID") not in (daemon, "0")
    wait_until(lambda: workers(debian) == ready, 30, "the workers' return")
    assert show(debian, "umad-serve", "MainPID") == serve


def _read_the_journal(debian: Container) -> None:
    """From the first start over the upgrade: who came, with what, and how it went for them."""
    told = events(debian, "-u umad")
    first, second = (place for place, one in enumerate(told) if one["UMAD_EVENT"] == "started")
    names = {"runtime", *KINDS}
    loaded = {one["UMAD_WORKER"] for one in told[first:second] if one["UMAD_EVENT"] == "loaded"}
    assert loaded == names | {"greedy"}
    back = {
        one["UMAD_WORKER"]: int(one["UMAD_HELD_BYTES"])
        for one in told[second:]
        if one["UMAD_EVENT"] == "registered"
    }
    assert {*back} == names
    assert all(0 < back[name] < parse_bytes(QUOTAS[name]) for name in KINDS)
    ends = {"revoked", "complied", "stopped", "stopping", "left", "exited", "unloaded"}
    ended = [one for one in told if one["UMAD_EVENT"] in ends]
    assert [(one["UMAD_EVENT"], one.get("UMAD_WORKER")) for one in ended] == [
        ("revoked", "greedy"),
        ("stopped", "greedy"),
        ("stopping", None),
    ]
    assert "holds another version" not in journal(debian, "-u umad-serve")


def _purge(debian: Container) -> None:
    """While the models are loaded; what the administrator made goes by the same hand."""
    [engine] = {pid for _, pid, _ in workers(debian)}
    debian.run(f"{APT} purge umad", timeout_s=120)
    assert not debian.path(f"/proc/{engine}").exists()
    debian.run(f"rm -r {VENV} /run/systemd/system/umad.service.d; userdel somebody")
