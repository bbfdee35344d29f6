"""The ring of samples: what is in one, how long it reaches, and that it has an end."""

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from tests.daemon.running import eventually, running
from umad.client.memory import give_back
from umad.daemon import timeline
from umad.daemon.timeline import SAMPLE_EVERY_S, WORKERS_MAX, Timeline
from umad.wire.connection import Connection
from umad.wire.messages import Request, Response

T0 = 1_700_000_000.0


class Told:
    """A timeline that sees an engine, and what it answers."""

    def __init__(self) -> None:
        self.drive = Drive(engine())
        self.timeline = Timeline(T0)

    def look(self, after_s: float, **processes: int | None) -> None:
        """``p7=100`` is a look in which pid 7 holds 100 MiB."""
        self.drive.now_s += after_s
        held = {
            int(name[1:]): None if size is None else size * MB for name, size in processes.items()
        }
        self.drive.look(held)
        self.timeline.looked(self.drive.engine.state, self.drive.now_s)

    def parts(self, since_s: float = 0.0) -> Iterator[dict[str, Any]]:
        next_s: float | None = since_s
        while next_s is not None:
            part = self.timeline.answer(next_s)
            assert part["next"] is None or part["next"] > next_s
            next_s = part["next"]
            yield part

    def samples(self, since_s: float = 0.0) -> list[list[int]]:
        return [sample for part in self.parts(since_s) for sample in part["samples"]]


@pytest.fixture
def told() -> Told:
    return Told()


def test_of_ten_seconds_the_fullest_moment_stays_with_figures_that_belong_together(
    told: Told,
) -> None:
    told.drive.loaded(7, "llama", 200 * MB)
    for held in (100, 150, 120):
        told.look(1.0, p7=held)
    told.look(SAMPLE_EVERY_S, p7=90)
    [part] = [*told.parts()][:1]
    assert part["pools"] == ["system"]
    assert part["workers"] == [{"name": "llama", "pool": "system", "quota": 200 * MB}]
    unix_ms, granted, refused, used, free, booked, budget, holds, its = part["samples"][0]
    assert unix_ms == round((T0 + 3.0) * 1000)
    assert (holds, its, booked) == (150 * MB, 200 * MB, 200 * MB)
    assert (granted, refused) == (0, 0), "it was granted before the first look"
    assert used > free > 0
    assert budget == 2048 * MB
    assert told.samples()[-1][7] == 90 * MB, "the ten seconds that are not over are told, too"


def test_what_was_granted_and_refused_counts_for_one_sample_each(told: Told) -> None:
    told.look(1.0)
    told.drive.loaded(7, "a", 200 * MB)
    told.look(1.0, p7=1)
    told.drive.loaded(8, "b", 200 * MB)
    told.look(SAMPLE_EVERY_S, p7=1, p8=1)
    told.drive.connect(9)
    worker = told.drive.call(9, "register", model="c", quota=2000 * MB)["worker"]
    told.drive.refused(9, "reserve", worker=worker)
    told.look(1.0, p7=1, p8=1)
    assert [tuple(sample[1:3]) for sample in told.samples()] == [(2, 0), (0, 1)]


def test_what_is_not_known_is_told_as_unknown(told: Told) -> None:
    told.drive.loaded(7, "llama", 200 * MB)
    told.look(1.0, p7=None)
    assert told.samples()[0][7:] == [-1, 200 * MB]


def test_who_asks_for_the_rest_gets_each_sample_once_in_order(told: Told) -> None:
    told.drive.loaded(7, "llama", 200 * MB)
    for at in range(800):
        told.look(SAMPLE_EVERY_S, p7=at % 90)
        if at == 400:
            told.drive.loaded(8, "late", 100 * MB)
    parts = [*told.parts()]
    assert [len(part["workers"]) for part in parts] == [1, 1, 2, 2, 2]
    times = [sample[0] for part in parts for sample in part["samples"]]
    assert len(times) == 800
    assert all(after - before == SAMPLE_EVERY_S * 1000 for before, after in pairwise(times))
    assert told.samples(times[-3] / 1000) == told.samples()[-2:]
    assert told.samples(times[-1] / 1000) == []


def test_it_forgets_after_a_day(told: Told) -> None:
    for _ in range(12000):
        told.drive.now_s += SAMPLE_EVERY_S
        told.timeline.looked(told.drive.engine.state, told.drive.now_s)
    assert 8640 <= len(told.samples()) <= 8640 + 400
    for part in told.parts():
        crosses_the_wire(part)


@pytest.mark.slow
def test_a_crowd_has_an_end(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "BYTES_MAX", 100_000)
    for at in range(70):
        told.drive.loaded(100 + at, f"{at:064}", MB)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(500):
        told.drive.now_s += SAMPLE_EVERY_S
        told.timeline.looked(told.drive.engine.state, told.drive.now_s)
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 50_000 < kept < 150_000
    assert len(told.samples()) < 500, "the oldest had to go"
    for part in told.parts():
        assert len(part["workers"]) == WORKERS_MAX
        crosses_the_wire(part)


def crosses_the_wire(answer: dict[str, Any]) -> None:
    """Whole, within the protocol's limits."""
    client, server = (Connection(role, handshake=False) for role in ("client", "server"))
    [asked] = server.feed(client.send_request("timeline", {})[1])
    assert isinstance(asked, Request)
    [got] = client.feed(server.send_response(asked.id, result=answer))
    assert isinstance(got, Response)
    assert got.result == answer


@pytest.mark.slow
def test_a_daemon_gives_it_to_anybody_who_may_connect(tmp_path: Path) -> None:
    with running(tmp_path) as daemon, daemon.client() as client:
        give_back()  # what earlier tests left in this process would go meanwhile
        worker = client.worker("llama", quota="64MiB")
        model = worker.load(lambda: bytearray(b"x") * (32 << 20))
        client.call("status")
        daemon.wait_for("loaded")

        def held() -> int:
            answer = client.call("timeline")
            if not answer["workers"]:  # no look has seen it yet
                return 0
            assert answer["workers"] == [{"name": "llama", "pool": "system", "quota": 64 << 20}]
            return int(answer["samples"][-1][-2])

        eventually(lambda: held() > 24 << 20)
        del model
