"""Programs that know nothing of umad: what they may hold, when they have loaded, when they end."""

from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, process, settings, snapshot
from umad.core import deadlines, kin, outside
from umad.core.actions import Unwatch, Watch
from umad.core.engine import Engine
from umad.core.settling import Settling
from umad.errors import (
    AccessDenied,
    InvalidParams,
    LeaseNotFound,
    MemoryUnknown,
    NameTaken,
    NeverFits,
    QuotaDenied,
    QuotaExceeded,
    RequestRejected,
)
from umad.values import Outsider
from umad.wire.messages import check_params

CHILD = Outsider(identity(70), "llama-server", 0, launcher=identity(7))
UNIT = Outsider(
    identity(80),
    "llama.service",
    990,
    unit="llama.service",
    cgroup="system.slice/llama.service",
    others=frozenset({identity(81)}),
)
ADOPT = {"model": "llama", "unit": "llama.service", "outsider": UNIT}


@pytest.fixture
def drive() -> Drive:
    made = Drive(engine())
    made.connect(7)
    return made


def started(drive: Drive, **more: Any) -> int:
    """Program 70, run by 7, whose bytes are booked and that is let go."""
    params = {"model": "llama", "quota": 400 * MB, "process": 70, **more}
    worker = drive.call(7, "register", **params, outsider=CHILD)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=0)
    return int(worker)


def shown(drive: Drive) -> dict[str, Any]:
    worker: dict[str, Any] = drive.engine.status(drive.now_s)["workers"][0]
    return worker


def look(drive: Drive, after_s: float, held: int | None, pid: int = 70) -> None:
    drive.now_s += after_s
    drive.look({pid: held})


# ------------------------------------------------------------------------ run


def test_a_program_is_judged_by_all_it_holds_and_killed_in_its_launchers_stead(
    drive: Drive,
) -> None:
    started(drive)
    known = kin.known(drive.engine.state)[identity(70)]
    assert (known.uid, known.launcher) == (0, identity(7))
    assert (shown(drive)["pid"], shown(drive)["state"]) == (70, "ready")
    assert drive.booked() == 400 * MB
    look(drive, 0.1, 399 * MB)
    assert shown(drive)["measured"] == 399 * MB
    look(drive, 0.1, 401 * MB)
    assert drive.notified("revoke")[0].connection == 7
    look(drive, 0.05, 401 * MB)
    assert drive.kills() == [70]
    drive.exit(70)
    assert drive.event("stopped")["comm"] == "llama-server"
    assert drive.booked() == 0


def test_a_program_keeps_its_quota_when_its_launcher_has_died(drive: Drive) -> None:
    started(drive)
    drive.engine.disconnected(7, drive.now_s)
    assert deadlines.next_s(drive.engine.state) is None
    drive.pass_time(60.0)
    assert (shown(drive)["state"], drive.booked()) == ("ready", 400 * MB)
    look(drive, 0.1, 500 * MB)
    look(drive, 0.05, 500 * MB)
    assert drive.kills() == [70]


def test_a_launcher_that_lost_its_connection_while_it_waited_comes_back(drive: Drive) -> None:
    params = {"model": "llama", "quota": 400 * MB, "process": 70, "outsider": CHILD}
    worker = drive.call(7, "register", **params)["worker"]
    assert isinstance(drive.refused(7, "register", **params), NameTaken)
    drive.engine.disconnected(7, drive.now_s)
    drive.connect(7)
    assert drive.call(7, "register", **params)["worker"] == worker
    assert "lease" in drive.call(7, "reserve", worker=worker)


def test_a_launcher_whose_child_ends_while_it_waits_is_told(drive: Drive) -> None:
    drive.loaded(8, "other", 1000 * MB)
    params = {"model": "llama", "quota": 1900 * MB, "process": 70, "outsider": CHILD}
    worker = drive.call(7, "register", **params)["worker"]
    request = drive.ask(7, "reserve", worker=worker, wait_s=60.0)
    assert drive.answer(request) is None
    drive.exit(70)
    assert isinstance(drive.answer(request), LeaseNotFound)
    assert deadlines.next_s(drive.engine.state) is None


def test_who_may_not_be_registered_by_another(drive: Drive) -> None:
    for more in ({"held": MB}, {"loading": MB}, {"guard": True}):
        error = drive.refused(
            7, "register", model="b", quota=MB, process=70, outsider=CHILD, **more
        )
        assert isinstance(error, InvalidParams)
    started(drive)
    error = drive.refused(7, "register", model="b", quota=MB, process=70, outsider=CHILD)
    assert isinstance(error, NameTaken)
    drive.connect(70)
    error = drive.refused(70, "register", model="b", quota=MB)
    assert isinstance(error, NameTaken), "its books are not its own"


# -------------------------------------------------------------------- settling


def test_c07_the_peak_counts_until_the_program_has_settled(drive: Drive) -> None:
    started(drive, peak=900 * MB, settle_s=10.0)
    assert (shown(drive)["state"], drive.booked()) == ("loading", 900 * MB)
    look(drive, 30.0, 100 * MB)
    look(drive, 30.0, 100 * MB)
    assert drive.booked() == 900 * MB, "it imports, or downloads"
    look(drive, 1.0, 850 * MB)
    assert drive.events() == []
    look(drive, 1.0, None)
    look(drive, 11.0, 850 * MB)
    assert drive.events() == [], "above its quota it has not settled"
    look(drive, 1.0, 390 * MB)
    look(drive, 8.0, 390 * MB)
    assert drive.booked() == 900 * MB
    look(drive, 2.1, 390 * MB)
    assert drive.event("loaded")["measured_bytes"] == 390 * MB
    assert (shown(drive)["state"], drive.booked()) == ("ready", 400 * MB)
    look(drive, 1.0, 410 * MB)
    assert drive.event("revoked")["reason"] == "quota_exceeded"


def test_c07_above_its_peak_a_program_that_loads_is_stopped(drive: Drive) -> None:
    started(drive, peak=900 * MB)
    look(drive, 1.0, 901 * MB)
    assert drive.event("revoked")["reason"] == "peak_exceeded"


def test_a_load_is_over_at_the_latest_when_every_load_is(drive: Drive) -> None:
    started(drive, peak=900 * MB)
    look(drive, 1799.0, 10 * MB)
    assert drive.booked() == 900 * MB
    look(drive, 1.0, 10 * MB)
    assert drive.booked() == 400 * MB


def test_a_quota_that_changes_while_a_program_loads_leaves_its_peak(drive: Drive) -> None:
    worker = started(drive, peak=900 * MB, settle_s=5.0)
    drive.call(7, "set_quota", worker=worker, quota=500 * MB)
    assert drive.booked() == 900 * MB
    drive.call(7, "set_quota", worker=worker, quota=1000 * MB)
    assert drive.booked() == 1000 * MB
    look(drive, 1.0, 950 * MB)
    look(drive, 5.0, 950 * MB)
    assert drive.booked() == 1000 * MB


def test_settling_begins_anew_with_what_grows_more_than_noise() -> None:
    settling = Settling(for_s=10.0, until_s=1e9, since_s=0.0)
    assert not settling.seen(300 * MB, 400 * MB, 1.0)
    assert not settling.seen(303 * MB, 400 * MB, 9.0)
    assert not settling.seen(310 * MB, 400 * MB, 10.0)
    assert not settling.seen(310 * MB, 400 * MB, 19.9)
    assert not settling.seen(None, 400 * MB, 20.0), "unknown proves nothing"
    assert settling.seen(200 * MB, 400 * MB, 20.0)


# ----------------------------------------------------------------------- units


def test_a_unit_is_adopted_with_all_its_processes(drive: Drive) -> None:
    told = drive.call(7, "adopt", **ADOPT, quota=400 * MB, holds=100 * MB)
    assert told == {"pid": 80, "held": 100 * MB, "booked": 400 * MB}
    known = kin.known(drive.engine.state)[identity(80)]
    assert (known.cgroup, known.members) == ("system.slice/llama.service", {identity(81)})
    drive.engine.disconnected(7, drive.now_s)
    look(drive, 5.0, 500 * MB, pid=80)
    look(drive, 0.05, 500 * MB, pid=80)
    assert drive.kills() == [80, 81]
    assert kin.known(drive.engine.state)[identity(80)].cgroup == "", "it may start again"
    drive.exit(80)
    drive.engine.searched({identity(80): frozenset()}, drive.now_s)
    assert drive.engine.state.processes == {}


def test_who_follows_a_units_first_process_stands_for_it(drive: Drive) -> None:
    """A service that forks into the background, or one whose main process is replaced."""
    drive.call(7, "adopt", **ADOPT, quota=400 * MB)
    look(drive, 0.1, 500 * MB, pid=80)  # the case of the first process ends with it
    drive.exit(80)
    assert drive.last[:2] == [Unwatch(identity(80)), Watch(identity(81))]
    assert (shown(drive)["pid"], shown(drive)["state"]) == (81, "ready")
    assert drive.booked() == 400 * MB
    look(drive, 0.1, 300 * MB, pid=81)
    assert drive.events() == []
    drive.exit(81)
    assert drive.event("exited")["freed_bytes"] == 400 * MB


def test_a_unit_that_would_be_stopped_at_once_is_not_adopted(drive: Drive) -> None:
    error = drive.refused(7, "adopt", **ADOPT, quota=400 * MB, holds=401 * MB)
    assert isinstance(error, QuotaExceeded)
    drive.call(7, "adopt", **ADOPT, quota=300 * MB, peak=400 * MB, holds=400 * MB)
    assert drive.booked() == 400 * MB


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"quota": 3000 * MB}, NeverFits),
        ({"quota": MB, "pool": "vram"}, NeverFits),
        ({"quota": 2 * MB, "peak": MB}, InvalidParams),
        ({"quota": MB, "holds": None}, MemoryUnknown),
        ({"quota": 1900 * MB}, QuotaDenied),
        ({"quota": MB, "model": "other"}, NameTaken),
    ],
)
def test_a_unit_is_refused_with_the_reason(
    drive: Drive, more: dict[str, Any], kind: type[RequestRejected]
) -> None:
    drive.loaded(8, "other", 300 * MB)
    assert isinstance(drive.refused(7, "adopt", **{**ADOPT, **more}), kind)


def test_a_unit_for_which_the_machine_has_no_room_is_refused(drive: Drive) -> None:
    drive.look({}, safe=1100 * MB)
    error = drive.refused(7, "adopt", **ADOPT, quota=400 * MB, holds=100 * MB)
    assert isinstance(error, QuotaDenied)
    drive.call(7, "adopt", **ADOPT, quota=400 * MB, holds=400 * MB)


def test_a_unit_whose_process_has_registered_is_refused(drive: Drive) -> None:
    drive.loaded(81, "own", 100 * MB)
    assert isinstance(drive.refused(7, "adopt", **ADOPT, quota=MB), InvalidParams)
    drive.connect(9, uid=1000)
    assert isinstance(drive.refused(9, "adopt", **ADOPT, quota=MB), AccessDenied)


def test_a_disowned_unit_runs_on_and_nothing_is_booked_for_it(drive: Drive) -> None:
    started(drive, model="program")
    drive.call(7, "adopt", **ADOPT, quota=400 * MB)
    assert isinstance(drive.refused(7, "disown", name="program"), LeaseNotFound)
    assert drive.call(7, "disown", name="llama") == {"freed": 400 * MB}
    assert drive.booked() == 400 * MB
    drive.pass_time(0.1)
    assert list(drive.engine.state.processes) == [identity(70)]
    look(drive, 0.1, 500 * MB, pid=80)
    assert drive.kills() == []


def test_a_unit_of_the_configuration_is_not_disowned() -> None:
    table = '[[worker]]\nname = "llama"\nunit = "llama.service"\nquota = "1MiB"\n'
    drive = Drive(engine('[memory]\nbudget = "2GiB"\n' + table))
    drive.connect(7)
    assert isinstance(drive.refused(7, "disown", name="llama"), InvalidParams)


@pytest.mark.parametrize("settled", [True, False])
def test_a_table_that_changes_counts_at_once(settled: bool) -> None:
    table = '[[worker]]\nname = "llama"\nunit = "llama.service"\nquota = "100MiB"\n'
    memory = '[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n'
    drive = Drive(engine(memory + table))
    drive.connect(7)
    peak = {} if settled else {"peak": 200 * MB}
    running(drive.engine, UNIT, 50 * MB, 1.0, quota=100 * MB, **peak)
    started(drive, model="beside", quota=MB)
    again = table.replace("100MiB", "300MiB") + 'peak = "400MiB"\npriority = 4\n'
    drive.last = drive.engine.reconfigure(settings(memory + again), 2.0)
    assert drive.event("quota_set")["was_bytes"] == 100 * MB
    assert drive.booked() == (300 if settled else 400) * MB + MB
    assert shown(drive)["priority"] == 4
    drive.last = drive.engine.reconfigure(settings(memory + again), 2.0)
    assert drive.events() == ["reloaded"]
    drive.last = drive.engine.reconfigure(settings(memory), 3.0)
    assert drive.event("disowned")["worker"] == "llama"
    assert drive.booked() == MB


# -------------------------------------------------------------------- restarts


def test_what_the_next_daemon_must_know(drive: Drive) -> None:
    started(drive, peak=900 * MB, settle_s=5.0, priority=3)
    drive.call(7, "adopt", **{**ADOPT, "model": "unit"}, quota=MB)
    [kept] = outside.kept(drive.engine.state)
    assert (kept["pid"], kept["launcher"]) == (70, [7, 700])
    assert kept["params"] == {
        "model": "llama",
        "quota": 400 * MB,
        "peak": 900 * MB,
        "pool": "system",
        "priority": 3,
        "settle_s": 5.0,
    }
    look(drive, 0.1, 300 * MB)
    look(drive, 5.0, 300 * MB)
    assert outside.kept(drive.engine.state)[0]["params"]["peak"] == 400 * MB


def running(to: Engine, outsider: Outsider, held: int | None, now_s: float, **more: Any) -> None:
    params = check_params("register", {"model": "llama", "quota": 400 * MB, **more})
    to.running(outsider, params, process(outsider.identity.pid, held), now_s)


def test_a_program_that_runs_is_booked_before_anything_is_granted() -> None:
    drive = Drive(engine(recovering_until_s=3.0))
    running(drive.engine, CHILD, 300 * MB, 1.0)
    assert (drive.booked(), shown(drive)["state"]) == (400 * MB, "ready")
    assert drive.engine.search_due(1.0)
    with pytest.raises(NameTaken):
        running(drive.engine, CHILD, 300 * MB, 1.0)
    with pytest.raises(NeverFits):
        running(drive.engine, UNIT, None, 1.0, pool="vram", model="b")
    running(drive.engine, UNIT, None, 1.0, quota=5000 * MB, model="b")
    assert drive.booked() == 5400 * MB, "its bytes are a fact, whatever the budget says"
    drive.now_s = 4.0
    drive.look({70: 300 * MB, 80: 4000 * MB})
    assert drive.events() == []


def test_before_memory_is_read_nothing_is_taken_over() -> None:
    made = Engine(
        engine().state.settings, engine().state.access, generation=1, recovering_until_s=0.0
    )
    with pytest.raises(MemoryUnknown):
        running(made, CHILD, MB, 1.0)
    made.observe(snapshot(1.0), 1.0)
    running(made, CHILD, MB, 1.0)
