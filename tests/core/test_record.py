"""An engine kept as plain data, and what another one decides that was made of it."""

import inspect
import json
from collections import Counter
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.core import fakes
from tests.core.drive import Drive
from tests.core.fakes import MB, identity
from umad.core import tape
from umad.core.access import Access
from umad.core.engine import Engine
from umad.core.plain import plain, typed
from umad.core.record import Record, differences, dump, rebuild
from umad.core.state import State
from umad.core.tape import INPUTS, RecordedEngine, done, feed
from umad.errors import InvariantBroken, UmadError
from umad.values import Zone, Zones

CONFIG = """
[memory]
reserve = "1GiB"
budget = "2GiB"
[leases]
residence_min = "0s"
evict_timeout = "1s"
[serve]
runtime_quota = "100MiB"
[[model]]
name = "llama"
kind = "chat"
path = "/home/alice/llama"
quota = "1GiB"
"""


def recorded() -> Drive:
    engine = RecordedEngine(
        fakes.settings(CONFIG),
        Access(uid=990, worker_gid=50, admin_gid=60),
        generation=3,
        recovering_until_s=0.0,
        unix_offset_s=1e9,
    )
    engine.observe(fakes.snapshot(0.0), 0.0)
    return Drive(engine)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def played(drive: Drive) -> tuple[Engine, dict[str, Any]]:
    """The tape played on an engine of its own, each step held against what was done; the end."""
    assert isinstance(drive.engine, RecordedEngine)
    start, *inputs, end = through_json(list(drive.engine.tape.records()))
    twin = rebuild(start["start"])
    for one in inputs:
        assert done(feed(twin, one["input"], one["given"])) == one["did"]
    return twin, end["end"]


SIZES = some.sampled_from([MB, 300 * MB, 700 * MB])
STEPS = some.lists(
    some.tuples(
        some.sampled_from(["load", "admit", "lock", "end", "keep", "look", "later", "cut", "exit"]),
        some.integers(1, 4),
        SIZES,
    ),
    max_size=25,
)


def walk(drive: Drive, steps: list[tuple[str, int, int]]) -> None:
    """Clients that do anything; what is refused is part of it."""
    state = drive.engine.state
    for step, pid, size in steps:
        if step != "exit" and pid not in state.clients:
            drive.connect(pid)
        if step == "look":
            drive.look(dict.fromkeys(range(1, 5), size))
        elif step == "later":
            drive.pass_time(0.7)
        elif step == "cut":
            drive.last = drive.engine.disconnected(pid, drive.now_s)
        elif step == "exit":
            drive.exit(pid)
        else:
            ask(drive, step, pid, size)


def ask(drive: Drive, step: str, pid: int, size: int) -> None:
    mine = sorted(drive.engine.state.clients[pid].workers)
    wait_s = 3.0 if pid > 2 else 0.0
    if not mine:
        drive.ask(pid, "register", model=f"model{pid}", quota=size, recycle=pid > 2, evict=pid < 4)
    elif step == "keep":
        drive.tell(pid, "keep", worker=mine[0])
    elif step == "load":
        drive.ask(pid, "reserve", worker=mine[0], wait_s=wait_s)
    elif step == "admit":
        drive.ask(pid, "admit", worker=mine[0], bytes=size, wait_s=wait_s)
    elif step == "lock":
        drive.ask(pid, "init_lock", worker=mine[0], wait_s=wait_s)
    for lease in drive.engine.state.ledger.of_worker(mine[0])[:1] if step == "end" and mine else ():
        known = {"lease": lease.id, "token": lease.token}
        if lease.bytes == size:
            drive.ask(pid, "commit", **known, measured=size)
        else:
            drive.ask(pid, "release", **known)


@given(STEPS, STEPS)
@settings(max_examples=30, deadline=None)
def test_an_engine_made_of_a_record_has_the_same_books_and_decides_the_same(first, second):
    drive = recorded()
    walk(drive, first)
    record = through_json(dump(drive.engine))
    twin = rebuild(record)
    assert differences(dump(twin), record) == []
    assert twin.state.ledger.leases == drive.engine.state.ledger.leases
    assert twin.status(drive.now_s) == drive.engine.status(drive.now_s) | {"pace": None}
    walk(drive, second)
    replayed, end = played(drive)
    assert differences(dump(replayed), end) == []


def test_a_breach_is_played_with_its_case():
    drive = recorded()
    drive.connect(7)
    drive.loaded(7, "greedy", 100 * MB)
    drive.look({7: 400 * MB})
    halfway = through_json(dump(drive.engine))
    assert [case["workers"] for case in halfway["cases"]] == [["greedy"]]
    drive.now_s += 0.06
    drive.look({7: 500 * MB})
    assert drive.kills() == [7]
    drive.engine.kill_sent(identity(7), drive.now_s)
    drive.exit(7)
    twin, end = played(drive)
    assert differences(dump(twin), end) == []
    resumed = rebuild(halfway)
    came = resumed.observe(fakes.snapshot(1.06, {7: 500 * MB}), 1.06)
    assert [action["do"] for action in done(came)].count("Kill") == 1


def test_who_waits_is_served_by_the_other_engine_too():
    drive = recorded()
    for pid in (7, 8):
        drive.connect(pid)
    drive.loaded(7, "first", 1500 * MB)
    worker = drive.call(8, "register", model="late", quota=900 * MB)["worker"]
    waits = drive.ask(8, "reserve", worker=worker, wait_s=60.0)
    drive.ask(7, "init_lock", worker=1)
    locked = drive.ask(8, "init_lock", worker=worker, wait_s=60.0)
    twin = rebuild(through_json(dump(drive.engine)))
    assert [len(queue) for queue in twin.state.queues] == [0, 1, 1]
    assert twin.state.mutex.holder == drive.engine.state.mutex.holder
    came = done(twin.exited(identity(7), drive.now_s))
    answered = {deed["request"] for deed in came if deed["do"] == "Reply"}
    assert answered == {waits, locked}


def test_a_difference_is_named():
    drive = recorded()
    drive.connect(7)
    before = dump(drive.engine)
    drive.loaded(7, "llama", 100 * MB)
    assert {"leases", "members", "processes"} <= set(differences(dump(drive.engine), before))
    drive.engine.state.counters["protocol_violations"] += 1
    assert differences(dump(drive.engine), dump(drive.engine) | {"counters": {}}) == []


def test_nothing_of_the_state_is_forgotten():
    kept = {one.name for one in fields(Record)}
    made = fakes.engine().state
    parts = {"ledger", "mutex", "watchdog"}  # in fields of other names
    # It follows from the looks; they were told when they happened; it answers questions alone.
    nothing_ruled = {"pace", "events", "history", "waits", "load_seconds"}
    assert set(vars(made)) - parts - nothing_ruled <= kept
    assert isinstance(made, State)


def test_every_method_that_changes_an_engine_is_an_input():
    reads = {"status", "limits", "pace", "search_due", "check_allowed"}
    public = {name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if name[0] != "_"}
    assert public == INPUTS | reads
    assert all(getattr(RecordedEngine, name) is not getattr(Engine, name) for name in INPUTS)


def test_what_rules_nothing_is_left_out():
    drive = recorded()
    drive.connect(7)
    drive.engine.state.clients[7].name = "alice's notebook"
    drive.call(7, "events")
    drive.call(7, "status")
    drive.loaded(7, "llama", MB)
    drive.call(7, "cost", model="llama")
    drive.exit(7)
    text = json.dumps(list(drive.engine.tape.records()))
    assert "alice" not in text
    assert '"method": "event"' not in text
    assert '"method": "status"' not in text
    assert '"method": "cost"' not in text
    assert '"name": "exited"' in text


# -------------------------------------------------------------------- the tape


def test_the_tape_has_an_end_and_still_plays_from_its_start():
    drive = recorded()
    drive.connect(7)
    drive.loaded(7, "llama", 100 * MB)
    longest = 0
    for _ in range(900):
        drive.now_s += 0.2
        drive.look({7: 50 * MB})
        longest = max(longest, sum(1 for _ in drive.engine.tape.records()) if _ % 300 == 0 else 0)
    records = list(drive.engine.tape.records())
    per_look = 3700
    assert tape.STRETCH_BYTES / per_look < len(records) < 2 * tape.STRETCH_BYTES / per_look + 3
    assert longest < 2 * tape.STRETCH_BYTES / per_look + 3
    assert records[0]["start"]["members"]
    twin, end = played(drive)
    assert differences(dump(twin), end) == []


def test_what_happens_while_a_tape_is_read_is_not_in_it():
    drive = recorded()
    records = drive.engine.tape.records()
    drive.connect(7)
    drive.loaded(7, "llama", 100 * MB)
    assert [record.get("input") for record in records] == [None, "observe", None]


def test_too_much_to_record_is_not_recorded_until_it_is_less(monkeypatch):
    monkeypatch.setattr(tape, "RECORDED_MAX", 3)
    monkeypatch.setattr(tape, "STRETCH_BYTES", 20_000)
    drive = recorded()
    for pid in range(1, 5):
        drive.connect(pid)
    assert list(drive.engine.tape.records()) == []
    for _ in range(20):
        drive.look()
    for pid in range(1, 5):
        drive.engine.disconnected(pid, drive.now_s)
    assert list(drive.engine.tape.records()) == []
    for _ in range(10):
        drive.look()
    played(drive)


# ------------------------------------------------------ what anybody may have written


class Colour(Enum):
    RED = 1


@dataclass
class Thing:
    name: str
    size: int = 1


@pytest.mark.parametrize(
    ("hint", "data"),
    [
        (int, True),
        (int, 1.0),
        (int, 2**64),
        (float, float("inf")),
        (float, "1"),
        (bool, 0),
        (str, None),
        (int | None, "x"),
        (Colour, 2),
        (Thing, []),
        (Thing, {"name": "a", "weight": 1}),
        (Thing, {"size": 1}),
        (Thing, {"name": 5}),
        (dict[str, int], [[1]]),
        (dict[int, int], {"a": 1}),
        (dict[str, int], {"a": "b"}),
        (dict[str, int], 5),
        (tuple[int, ...], {}),
        (tuple[int, str], [1]),
    ],
)
def test_what_is_not_of_its_type_is_refused(hint, data):
    with pytest.raises(ValueError, match=r"."):
        typed(hint, data)


def test_values_return_from_plain_data_as_they_were():
    for hint, value in (
        (tuple[int, str], (1, "a")),
        (frozenset[int], frozenset({3, 1})),
        (Counter[str], Counter(a=2)),
        (dict[int, Thing], {5: Thing("a", 2)}),
        (dict[int, Thing], {}),
        (Colour | None, Colour.RED),
        (type(None), None),
        (float, 1),
    ):
        assert typed(hint, through_json(plain(value))) == value
    assert typed(Thing, {"name": "a"}) == Thing("a", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"pools": [{"name": "a", "budget": 1, "parent": "a"}]},
        {"pools": [{"name": "a", "budget": 1, "parent": "nowhere"}]},
        {"pools": []},
        {"leases": [{"id": 1}]},
        {"members": [[1, {"worker": None, "client": None}]]},
        {"fill_rate": "fast"},
        {"unknown": 1},
    ],
    ids=repr,
)
def test_a_record_that_no_engine_wrote_is_refused(change):
    drive = recorded()
    drive.connect(7)
    drive.loaded(7, "llama", 100 * MB)
    with pytest.raises((ValueError, LookupError, InvariantBroken)):
        rebuild(through_json(dump(drive.engine)) | change)


def test_an_input_that_no_engine_takes_is_refused():
    engine = fakes.engine()
    look = fakes.snapshot(1.0)
    zones = Zones(1.0, 1 << 40, (Zone(0, "Normal", (1,)),))
    for method, given_ in (
        ("status", {"now_s": 1.0}),
        ("__init__", {}),
        ("exited", {"identity": {"pid": 1, "start_ticks": 1}, "now_s": 1.0, "why": "x"}),
        ("exited", {"identity": 5, "now_s": 1.0}),
        ("observe", {"snapshot": plain(look) | {"zones": plain(zones)}, "now_s": 1.0}),
        ("observe", {"snapshot": plain(look) | {"pools": {"x": plain(look.pools["system"])}}}),
    ):
        with pytest.raises((ValueError, UmadError)):
            feed(engine, method, through_json(given_))
