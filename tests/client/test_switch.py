"""A model that is asked to go, to stay, and to come back."""

from typing import Any

from tests.client.conftest import Daemon
from tests.daemon.running import eventually
from umad.client import connect


class Model:
    """Holds nothing."""


def test_only_who_can_go_says_so_and_hears_of_it(daemon: Daemon, until: Any) -> None:
    heard: list[tuple[str, int]] = []
    with (
        connect(daemon.path) as client,
        client.worker(
            "a",
            quota=1000,
            on_evict=lambda told: heard.append((told["for_worker"], told["worker"])),
            on_evict_cancelled=lambda told: heard.append(("stay", told["worker"])),
            on_load=lambda told: heard.append(("load", told["worker"])),
        ) as able,
        client.worker("b", quota=1000, on_load=lambda told: heard.append(("b", 0))) as unable,
    ):
        assert [one["evict"] for one in daemon.of("register")] == [True, False]
        for worker in (unable, able):
            told = {"worker": worker.id, "reason": "", "for_worker": "c", "deadline_s": 5.0}
            daemon.tell("evict", **told)
        daemon.tell("evict_cancelled", worker=able.id)
        daemon.tell("load", worker=able.id)
        until(lambda: len(heard) == 3)
        assert heard == [("c", able.id), ("stay", able.id), ("load", able.id)]


def test_who_is_wanted_says_so(daemon: Daemon) -> None:
    with connect(daemon.path) as client, client.worker("a", quota=1000) as worker:
        assert worker.keep()
        daemon.wait(lambda: daemon.of("keep") == [{"worker": worker.id}])
        daemon.stop()
        eventually(lambda: not worker.keep())


def test_a_load_says_whether_others_may_go_for_it(daemon: Daemon) -> None:
    with connect(daemon.path) as client, client.worker("a", quota="1GiB") as worker:
        for evict in (True, False):
            model = worker.load(Model, evict=evict)
            worker.unload()
            del model
        assert [one["evict"] for one in daemon.of("reserve")] == [True, False]
