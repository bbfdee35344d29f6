"""How fast the daemon looks, and what it makes of bytes that do not come back."""

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from umad.core.engine import FAST_PACE_S, LEAKING_AFTER_S


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def test_the_pace_follows_the_rate_towards_the_limit(drive: Drive) -> None:
    drive.loaded(7, "a", 1000 * MB)
    drive.look({7: 100 * MB})
    assert drive.engine.pace_s(drive.now_s) == 0.2
    drive.now_s += 0.2
    drive.look({7: 120 * MB})  # 100 MB/s, 8.8 s to go
    assert drive.engine.pace_s(drive.now_s) == 0.2
    drive.now_s += 0.2
    drive.look({7: 720 * MB})  # 3,000 MB/s, 93 ms to go
    assert drive.engine.pace_s(drive.now_s) == pytest.approx(280 / 3000 / 4)
    drive.now_s += 0.02
    drive.look({7: 980 * MB})
    assert drive.engine.pace_s(drive.now_s) == FAST_PACE_S
    drive.now_s += 0.01
    drive.look({7: 980 * MB})  # it stands still
    assert drive.engine.pace_s(drive.now_s) == 0.2


def test_what_cannot_be_read_does_not_drive_the_pace(drive: Drive) -> None:
    drive.loaded(7, "a", 1000 * MB)
    for size in (100 * MB, None, 900 * MB):
        drive.now_s += 0.2
        drive.look({7: size})
        assert drive.engine.pace_s(drive.now_s) == 0.2
    drive.look({7: 990 * MB})  # no time has passed: no rate
    assert drive.engine.pace_s(drive.now_s) == 0.2


def test_who_keeps_what_it_gave_back_is_leaking(drive: Drive) -> None:
    worker = drive.loaded(7, "liar", 1500 * MB)
    lease = drive.engine.state.ledger.of_worker(worker)[0]
    drive.look({7: 1400 * MB})
    drive.call(7, "release", lease=lease.id, token=lease.token)
    drive.connect(8)
    rival = drive.call(8, "register", model="rival", quota=1000 * MB)["worker"]
    waiting = drive.ask(8, "reserve", worker=rival, wait_s=60.0)
    for _ in range(6):
        drive.look({7: 1400 * MB})
        assert drive.answer(waiting) is None
        drive.now_s += LEAKING_AFTER_S / 5
    assert drive.engine.state.counters["leaks"] == 1
    assert drive.engine.status(drive.now_s)["workers"][0]["state"] == "leaking"
    assert isinstance(drive.answer(drive.ask(8, "ping")), dict)
    drive.look({7: 0})  # it was trimmed after all
    assert drive.engine.status(drive.now_s)["workers"][0]["state"] == "registered"
    assert drive.booked() == 1000 * MB
