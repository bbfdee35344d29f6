"""How fast the daemon looks and glances, and what it makes of bytes that do not come back."""

import dataclasses

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, snapshot
from umad.core.pace import (
    FAST_PACE_S,
    GLANCE_MIN_S,
    GLANCE_S,
    Pace,
    Watched,
    fastest,
    next_glance_s,
)
from umad.core.watchdog import LEAKING_AFTER_S
from umad.units import GIB

A, B = identity(7), identity(8)


@pytest.fixture
def drive() -> Drive:
    return Drive(engine())


def pace(drive: Drive) -> Pace:
    return drive.engine.pace(drive.now_s)


def test_the_pace_follows_the_rate_towards_the_limit(drive: Drive) -> None:
    drive.loaded(7, "a", 1000 * MB)
    drive.look({7: 100 * MB})
    assert (pace(drive).look_s, pace(drive).reason) == (0.2, "ease")
    drive.now_s += 0.2
    drive.look({7: 120 * MB})  # 100 MB/s, 8.8 s to go
    assert pace(drive).look_s == 0.2
    drive.now_s += 0.2
    drive.look({7: 720 * MB})  # 3,000 MB/s, 93 ms to go
    assert pace(drive).look_s == pytest.approx(280 / 3000 / 4)
    assert pace(drive).reason == "growing"
    drive.now_s += 0.02
    drive.look({7: 980 * MB})
    assert pace(drive).look_s == FAST_PACE_S
    drive.now_s += 0.01
    drive.look({7: 980 * MB})  # it stands still
    assert pace(drive).look_s == 0.2


def test_who_grows_is_glanced_at_as_well(drive: Drive) -> None:
    drive.engine.state.fill_rate = 20 * GIB
    drive.loaded(7, "a", 1000 * MB)
    drive.look({7: 120 * MB})
    drive.now_s += 0.2
    drive.look({7: 720 * MB})
    assert (pace(drive).glance_s, pace(drive).reason) == (GLANCE_S, "growing")


def test_what_cannot_be_read_does_not_drive_the_pace(drive: Drive) -> None:
    drive.loaded(7, "a", 1000 * MB)
    for size in (100 * MB, None, 900 * MB):
        drive.now_s += 0.2
        drive.look({7: size})
        assert pace(drive).look_s == 0.2
    drive.look({7: 990 * MB})  # no time has passed: no rate
    assert pace(drive).look_s == 0.2
    drive.look({7: 990 * MB}, safe=None)
    assert pace(drive).rooms == {}


def test_who_could_pass_a_limit_before_the_next_look_is_glanced_at(drive: Drive) -> None:
    drive.engine.state.fill_rate = GIB
    drive.loaded(7, "a", 800 * MB)
    drive.loaded(8, "b", 800 * MB)
    drive.look({7: 700 * MB, 8: 500 * MB})
    first = pace(drive)
    assert first.rooms == {A: 100 * MB}  # 205 MB at most in an interval: b cannot get there
    assert first.glance_s == pytest.approx(100 / 1024)  # and a not sooner than this
    assert (first.look_s, first.reason) == (0.2, "near_limit")
    drive.look({7: 795 * MB, 8: 500 * MB})
    assert pace(drive).glance_s == GLANCE_S
    drive.look({7: 500 * MB, 8: 500 * MB})
    assert (pace(drive).glance_s, pace(drive).reason) == (None, "ease")
    state = drive.engine.status(drive.now_s)
    assert state["pace"] == {"look_s": 0.2, "glance_s": None, "reason": "ease"}
    assert state["fill_rate_bytes_per_s"] == GIB
    assert drive.engine.status(drive.now_s)["pace"]["reason"] == "ease"


def test_a_machine_short_of_memory_is_glanced_at(drive: Drive) -> None:
    drive.engine.state.fill_rate = GIB
    drive.look(safe=GIB + 100 * MB)  # the reserve is 1 GiB
    assert pace(drive).rooms == {None: 100 * MB}
    assert pace(drive).reason == "short_memory"
    drive.look(safe=GIB - MB)  # below it already: nothing more to be seen in time
    assert pace(drive).glance_s is None


def test_a_fast_pace_needs_no_glance_and_who_is_over_has_a_case(drive: Drive) -> None:
    drive.engine.state.fill_rate = 100 * GIB
    drive.loaded(7, "a", 500 * MB)
    drive.look({7: 501 * MB})
    assert pace(drive) == Pace(FAST_PACE_S, None, "returning", 100 * GIB)
    assert drive.engine.pace(drive.now_s + 6.0).look_s == 0.2  # a case that nobody can end


def test_the_fastest_growth_raises_the_fill_rate(drive: Drive) -> None:
    drive.loaded(7, "a", 1500 * MB)
    drive.look({7: 100 * MB})
    drive.now_s += 0.1
    drive.look({7: 400 * MB})
    assert drive.engine.state.fill_rate == pytest.approx(3000 * MB, rel=1e-6)
    drive.now_s += 0.1
    drive.look({7: 410 * MB})
    drive.now_s += FAST_PACE_S / 4
    drive.look({7: 510 * MB})  # too close to be a rate
    assert drive.engine.state.fill_rate == pytest.approx(3000 * MB, rel=1e-6)
    drive.now_s += 0.1
    drive.look({7: 510 * MB}, safe=13 * GIB)  # somebody else, all over the machine
    assert drive.engine.state.fill_rate == pytest.approx(10 * GIB, rel=1e-6)


def test_only_what_is_alike_makes_a_rate() -> None:
    earlier, now = snapshot(1.0, {7: 0}), snapshot(2.0, {7: GIB, 8: GIB})
    assert fastest(earlier, now) == GIB
    counted = dataclasses.replace(now.processes[A].bytes, source="smaps_rollup")
    other = dataclasses.replace(now.processes[A], bytes=counted)
    assert fastest(earlier, dataclasses.replace(now, processes={A: other})) == 0
    assert fastest(earlier, dataclasses.replace(now, pools={}, processes={})) == 0


@pytest.mark.parametrize(
    ("before", "now", "wait_s"),
    [
        pytest.param(0, 0, GLANCE_S, id="at rest"),
        pytest.param(0, -50, GLANCE_S, id="it shrinks"),
        pytest.param(40, 50, GLANCE_S, id="its crossing is far"),
        pytest.param(0, 75, 25 / 75 * GLANCE_S, id="a look in the moment of the crossing"),
        pytest.param(50, 99, GLANCE_MIN_S, id="as good as there"),
        pytest.param(50, 100, 0.0, id="there"),
        pytest.param(50, 300, 0.0, id="past it"),
    ],
)
def test_the_next_glance(before: int, now: int, wait_s: float) -> None:
    current = Pace(0.2, GLANCE_S, "near_limit", 10 * GIB, {A: 100 * MB})
    held = 300 * MB
    first: dict[Watched, int] = {A: held}
    after: dict[Watched, int] = {A: held + before * MB}
    last: dict[Watched, int] = {A: held + now * MB}
    assert next_glance_s(current, first, after, last, GLANCE_S) == pytest.approx(wait_s)


def test_a_glance_is_no_sooner_than_the_fill_rate_and_needs_its_figures() -> None:
    current = Pace(0.2, 0.1, "near_limit", GIB, {A: 100 * MB, B: 150 * MB})
    still: dict[Watched, int] = {A: 0, B: 0}
    assert next_glance_s(current, still, still, still, 0.1) == pytest.approx(100 / 1024)
    assert next_glance_s(current, still, still, {B: 0}, 0.1) == pytest.approx(150 / 1024)
    assert next_glance_s(current, {}, {}, still, 0.1) == float("inf")


def stalled(drive: Drive, some_permille: int, full_us: int, **more: int | None) -> None:
    drive.now_s += 0.2
    look = snapshot(drive.now_s, {}, **more)  # type: ignore[arg-type]
    info = {"psi_some_permille_avg10": some_permille, "psi_full_us_total": full_us}
    drive.engine.observe(dataclasses.replace(look, info=info), drive.now_s)


def test_stalls_keep_a_second_reserve(drive: Drive) -> None:
    worker = drive.loaded(7, "a", 100 * MB)
    short = 2 * GIB + 300 * MB  # a reserve is 1 GiB; 100 MiB are booked and not yet touched
    stalled(drive, 100, 5, safe=short)
    assert drive.engine.state.pressed is False  # the first total says nothing
    stalled(drive, 101, 5, safe=short)
    error = drive.refused(7, "admit", worker=worker, bytes=201 * MB)
    assert (error.code, error.details["binding"]) == ("quota_denied", "psi")
    assert error.retry_after_s == 5.0
    pool = drive.engine.status(drive.now_s)["pools"][0]
    assert (pool["free"], pool["binding"]) == (200 * MB, "psi")
    drive.call(7, "admit", worker=worker, bytes=200 * MB)
    stalled(drive, 900, 5)  # memory in plenty: one container that thrashes refuses nobody
    drive.call(7, "admit", worker=worker, bytes=700 * MB)


def test_stalls_are_over_after_a_while(drive: Drive) -> None:
    stalled(drive, 0, 5)
    stalled(drive, 0, 6)  # all tasks at once
    assert drive.engine.state.pressed is True
    for _ in range(9):
        stalled(drive, 49, 6)
        assert drive.engine.state.pressed is True
    stalled(drive, 50, 6)
    assert drive.engine.state.pressed is True
    drive.look()  # not readable: it stays as it is
    assert drive.engine.state.pressed is True
    stalled(drive, 49, 6)
    assert drive.engine.status(drive.now_s)["pressed"] is False


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
