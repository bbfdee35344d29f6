"""What forwards took and who was stopped outlives the daemon, and no state of its file ends it."""

from pathlib import Path

import pytest

from tests.daemon.running import Daemon, Raw, running
from umad.config import parse
from umad.daemon.main import _state_folder
from umad.host.history import ASIDE, NAME
from umad.units import MIB

DONE = {"predicted": 7 * MIB, "peak": 8 * MIB, "tokens": 100, "batch": 2, "seconds": 0.1}


def forward(daemon: Daemon, **more: object) -> None:
    with Raw(daemon.socket) as peer:
        worker = peer.call("register", model="llama", quota=64 * MIB)["worker"]
        peer.socket.sendall(
            peer.wire.send_notification("forward_done", {"worker": worker, **DONE, **more})
        )
        peer.call("ping")


def samples(daemon: Daemon) -> list[list[object]]:
    with Raw(daemon.socket) as peer:
        return list(peer.call("cost", model="llama")["samples"])


@pytest.mark.slow
def test_samples_come_back_after_a_restart(folder: Path) -> None:
    with running(folder) as daemon:
        forward(daemon, exact=True)
        told = daemon.wait_for("prediction_exceeded", worker="llama")
        assert (told["predicted_bytes"], told["took_bytes"]) == (7 * MIB, 8 * MIB)
        assert daemon.status()["counters"]["prediction_exceeded"] == 1
    with running(folder) as daemon:
        assert samples(daemon) == [[100, 2, 8 * MIB, 7 * MIB, True]]
        forward(daemon, exact=True)
        assert len(samples(daemon)) == 2
    (folder / NAME).write_bytes(b"no database" * 1000)
    with running(folder) as daemon:
        assert ASIDE in daemon.wait_for("history", level="error")["why"]
        assert samples(daemon) == []


@pytest.mark.slow
def test_without_a_folder_to_write_in_it_serves_all_the_same(folder: Path) -> None:
    text = (
        f'[daemon]\nsocket = "{folder}/umad.sock"\nstate = "/proc/nowhere"\n'
        '[memory]\nreserve = "64MiB"\nbudget = "2GiB"\n'
    )
    daemon = Daemon(folder, text=text).start()
    try:
        assert "nothing is kept on disk" in daemon.wait_for("history")["why"]
        forward(daemon, exact=True)
        assert len(samples(daemon)) == 1
    finally:
        assert daemon.stop() == 0
    assert not list(folder.glob("history*"))


def test_where_it_lies() -> None:
    told = parse('[daemon]\nstate = "/srv/umad"\n')
    auto = parse("")
    given = {"STATE_DIRECTORY": "/var/lib/umad:/var/lib/other"}
    assert _state_folder(told, given) == Path("/srv/umad")
    assert _state_folder(auto, given) == Path("/var/lib/umad")
    assert _state_folder(auto, {}) == Path(auto.daemon.socket).parent
