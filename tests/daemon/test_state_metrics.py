"""What the metrics say of the state: waits, physical bytes, fragmentation, predictions."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, snapshot
from tests.daemon.shown import Shown, names, rich, value
from umad.daemon.state_metrics import _COUNTERS
from umad.units import MIB
from umad.values import AccountFigures, Segments, Zone, Zones

CORE = Path(__file__).parents[2] / "umad"


@pytest.fixture
def shown() -> Shown:
    return Shown(Drive(engine()))


def test_how_long_who_waits(shown: Shown) -> None:
    drive = shown.drive
    drive.loaded(7, "llama", 1500 * MB)
    drive.connect(8)
    second = drive.call(8, "register", model="coder", quota=1000 * MB)["worker"]
    drive.ask(8, "reserve", worker=second, wait_s=60.0)
    drive.now_s += 20
    series = shown.series()
    assert value(series, "umad_queue_waiting", queue="load") == 1
    assert value(series, "umad_queue_oldest_seconds", queue="load") == pytest.approx(20.4)
    assert value(series, "umad_queue_oldest_seconds", queue="burst") == 0
    assert value(series, "umad_wait_seconds_count", queue="load") == 1  # the one that had room
    drive.exit(7)
    drive.look({8: 0})
    series = shown.series()
    assert value(series, "umad_queue_oldest_seconds", queue="load") == 0
    assert value(series, "umad_wait_seconds_sum", queue="load") == pytest.approx(20.4)
    assert value(series, "umad_load_seconds_count") == 1
    drive.call(8, "init_lock", worker=second)
    assert value(shown.series(), "umad_wait_seconds_count", queue="init") == 1


def test_what_a_burst_takes_back_of_its_own_was_a_wait_too(shown: Shown) -> None:
    drive = shown.drive
    worker = drive.loaded(7, "llama", 1000 * MB)
    for _ in range(2):
        lease = drive.call(7, "admit", worker=worker, bytes=900 * MB)
        drive.call(7, "release", lease=lease["lease"], token=lease["token"])
    assert value(shown.series(), "umad_wait_seconds_count", queue="burst") == 2


def test_what_a_worker_physically_holds_and_who_says_so(shown: Shown) -> None:
    drive = shown.drive
    drive.loaded(7, "one", 300 * MB)
    drive.loaded(8, "guarded", 300 * MB, guard=True)
    drive.loaded(8, "beside", 300 * MB, instance=1)
    counted = AccountFigures(used=120 * MB, peak=130 * MB, refused=0)
    drive.engine.state.processes[identity(7)].baseline = 20 * MB
    drive.look({7: 200 * MB, 8: 400 * MB}, accounts={2: counted})
    series = shown.series()
    physical = {key: size for key, size in series.items() if key[0] == "umad_worker_physical_bytes"}
    assert {tuple(dict(labels).values()): size for (_, labels), size in physical.items()} == {
        ("status", "one"): 180 * MB,
        ("account page", "guarded"): 120 * MB,  # of the rest of process 8 nobody knows
    }
    assert value(series, "umad_worker_info", worker="beside/1", process="8", pool="system") == 1
    assert value(series, "umad_process_state", process="8", state="ok") == 1
    drive.look({7: None, 8: None})
    assert not any(name == "umad_worker_physical_bytes" for name, _ in shown.series())


def test_what_nobody_of_umads_holds(shown: Shown) -> None:
    drive = shown.drive
    drive.loaded(7, "llama", 1500 * MB)
    drive.look({7: 1024 * MB}, safe=12 * 1024 * MB)
    unattributed = "umad_pool_unattributed_bytes"
    assert value(shown.series(), unattributed, pool="system") == 3 * 1024 * MB
    drive.look({7: 9000 * MB}, safe=12 * 1024 * MB)  # shared pages count for each
    assert value(shown.series(), unattributed, pool="system") == 0
    drive.look({7: None}, safe=12 * 1024 * MB)
    assert value(shown.series(), unattributed, pool="system") is None
    assert value(shown.series(), "umad_unexplained_bytes") is None
    drive.engine.observe(
        replace(snapshot(drive.now_s), info={"mem_unexplained": 7 * MB}), drive.now_s
    )
    assert value(shown.series(), "umad_unexplained_bytes") == 7 * MB


def test_how_the_free_memory_lies(shown: Shown) -> None:
    drive = shown.drive
    series = shown.series()
    assert value(series, "umad_fragmentation_ratio") is None
    assert value(series, "umad_fragmentation_risk", risk="unknown") == 1
    zones = Zones(1.0, 4096, (Zone(0, "Normal", (524288, *[0] * 10)),))  # 2 GiB in pages
    drive.loaded(7, "llama", 1000 * MB)
    crumbs = Segments(2000 * MB, 500 * MB, 0, 1500 * MB, 1500 * MB, 300 * MB)
    next(iter(drive.engine.state.processes.values())).segments = crumbs
    drive.engine.observe(replace(snapshot(drive.now_s, {7: 0}), zones=zones), drive.now_s)
    series = shown.series()
    assert value(series, "umad_fragmentation_ratio") == 1
    assert value(series, "umad_process_fragmentation_ratio", process="7") == pytest.approx(0.8)


def test_how_near_the_predictions_came(shown: Shown) -> None:
    drive = shown.drive
    worker = drive.loaded(7, "llama", 1000 * MB)

    def forward(predicted: int, took: int, *, exact: bool = True) -> None:
        drive.tell(
            7,
            "forward_done",
            worker=worker,
            predicted=predicted,
            peak=took,
            tokens=8,
            batch=1,
            seconds=0.1,
            exact=exact,
        )

    forward(0, 10 * MIB)  # nothing was predicted
    forward(10 * MIB, 8 * MIB)
    forward(10 * MIB, 30 * MIB, exact=False)
    series = shown.series()
    ratio = "umad_prediction_ratio"
    assert value(series, f"{ratio}_count", model="llama") == 2
    assert value(series, f"{ratio}_bucket", model="llama", le="0.9") == 1
    assert value(series, f"{ratio}_bucket", model="llama", le="2.0") == 1
    assert value(series, f"{ratio}_sum", model="llama") == pytest.approx(3.8)
    assert value(series, "umad_prediction_exceeded_total") == 1
    drive.exit(7)
    assert names(shown.series(), "model") == set()


def test_people_and_the_machine_may_close_the_door(shown: Shown) -> None:
    drive = shown.drive
    assert value(shown.series(), "umad_drained") == 0
    drive.connect(7)
    drive.call(7, "drain")
    assert value(shown.series(), "umad_drained") == 1
    assert value(shown.series(), "umad_admission_closed") == 0
    drive.look({}, safe=100 * MB)
    assert value(shown.series(), "umad_admission_closed") == 1


def test_every_counter_is_described() -> None:
    """So that each is there from the first moment on, and none under a name that nobody wrote."""
    counted = {
        name
        for path in CORE.rglob("*.py")
        for name in re.findall(r'counters\["(\w+)"\] \+=', path.read_text())
    }
    assert counted == set(_COUNTERS)


def test_a_rich_state_has_no_counter_of_another_name(shown: Shown) -> None:
    rich(shown)
    assert not any("How often:" in line for line in shown.text().decode().splitlines())
