"""Conservative mode: half is promised, and a load is told to touch its memory first."""

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, settings
from umad.units import GIB

ON = '[memory]\nreserve = "1GiB"\nconservative = true\n'


def test_half_of_the_capacity_less_the_reserve_may_be_booked() -> None:
    assert engine(ON).state.ledger.pools["system"].budget == 7 * GIB  # of 16
    assert engine(ON.replace("true", "false")).state.ledger.pools["system"].budget == 15 * GIB
    small = engine(ON + 'budget = "2GiB"\n')
    assert small.state.ledger.pools["system"].budget == 2 * GIB


@pytest.mark.parametrize(("text", "told"), [(ON, True), (ON.replace("true", "false"), False)])
def test_a_load_is_told_to_touch_its_memory_and_a_burst_is_not(text: str, told: bool) -> None:
    drive = Drive(engine(text))
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=100 * MB)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    assert lease.get("prefault", False) is told
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=50 * MB)
    assert "prefault" not in drive.call(7, "admit", worker=worker, bytes=MB)


def test_the_batching_window_is_short() -> None:
    assert settings(ON).batching_window_s == 0.005
    assert 0.010 <= settings().batching_window_s <= 0.015
