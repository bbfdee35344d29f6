from dataclasses import replace
from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from tests.core.fakes import snapshot as look
from umad.core.actions import Action, Compact, Event, Notify
from umad.core.fragmentation import (
    BLOCK_BYTES,
    MATERIAL_BYTES,
    Compaction,
    Level,
    Need,
    judge_segments,
    judge_zones,
    largest_free,
    ratio_of,
)
from umad.core.ladder import (
    DWELL_S,
    IDLE_S,
    RECYCLE_REST_S,
    REST_IN_VAIN_S,
    REST_S,
    UNVERIFIED_S,
)
from umad.units import GIB, KIB, MIB
from umad.values import Segments, Watermarks, Zone, Zones

PAGE = 4 * KIB
MARKS = Watermarks(MIB, 2 * MIB, 3 * MIB, 0, 64 * GIB)


def zone(
    *, pages: int = 0, blocks: int = 0, marks: Watermarks | None = MARKS, node: int = 0
) -> Zone:
    """``pages`` single free pages and ``blocks`` free blocks of 4 MiB."""
    return Zone(node, "Normal", (pages, *[0] * 9, blocks), marks)


def machine(at_s: float, *zones: Zone, **counters: int) -> Zones:
    return Zones(at_s, PAGE, zones, counters=counters)


def crumbs(at_s: float, **counters: int) -> Zones:
    """2 GiB free, nothing of it in blocks."""
    return machine(at_s, zone(pages=2 * GIB // PAGE), **counters)


def whole(at_s: float) -> Zones:
    """2 GiB free in blocks of 4 MiB."""
    return machine(at_s, zone(blocks=512))


def compaction(*readings: dict[str, int] | None, every_s: float = 2.0) -> Compaction:
    made = Compaction()
    for number, counters in enumerate(readings):
        made.add(Zones(number * every_s, PAGE, counters=counters))
    return made


def stalls(attempts: int, failed: int) -> dict[str, int]:
    return {"compact_stall": attempts, "compact_fail": failed}


# --- the free lists ---


def test_the_ratio_is_the_share_in_blocks_that_are_too_small():
    half = (zone(pages=1024, blocks=1),)  # 4 MiB in pages, 4 MiB in a block
    assert ratio_of(half, PAGE, 4 * MIB) == 0.5
    assert ratio_of(half, PAGE, PAGE) == 0
    assert ratio_of((zone(),), PAGE, PAGE) is None
    assert ratio_of((*half, zone(blocks=6, node=1)), PAGE, 4 * MIB) == pytest.approx(1 / 8)
    assert largest_free(half[0], PAGE) == 4 * MIB
    assert largest_free(zone(pages=3), PAGE) == PAGE
    assert largest_free(zone(), PAGE) == 0


def test_pages_and_orders_of_any_size():
    zones = Zones(0, 64 * KIB, (Zone(0, "Normal", (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1)),))
    assert ratio_of(zones.zones, zones.page_bytes, 512 * MIB) == pytest.approx(2 / 514)
    unknown = judge_zones(zones, Compaction(), Need(GIB, GIB))
    assert (unknown.level, unknown.ratio) == (Level.UNKNOWN, None)
    assert "keeps no blocks of 1.0 GiB" in unknown.reason


@pytest.mark.parametrize(
    ("zones", "level", "reason"),
    [
        (Zones(0, PAGE), "unknown", "not known"),
        (Zones(0, PAGE, problem="/proc/buddyinfo: garbage"), "unknown", "garbage"),
        (Zones(0, PAGE, (zone(blocks=512),), counters=None), "unknown", "counters"),
        (whole(0), "low", "2.0 GiB free in blocks of 4.0 MiB"),
        (crumbs(0), "high", "of 2.0 GiB free only 0 B in blocks of 4.0 MiB"),
        # blocks enough, but the watermarks would be reached
        (machine(0, zone(blocks=256)), "unknown", "to be reclaimed"),
        (machine(0, zone(blocks=256, marks=None)), "unknown", "watermarks"),
        (machine(0, zone(pages=1000)), "unknown", "to be reclaimed"),
        # the sum over nodes counts
        (machine(0, zone(blocks=200), zone(blocks=200, node=1)), "low", "1.6 GiB free"),
        # kept from requests that a higher zone could serve
        (
            machine(0, zone(blocks=512, marks=replace(MARKS, protection=2 * GIB))),
            "unknown",
            "0 B free",
        ),
    ],
)
def test_the_risk_of_a_gibibyte(zones: Zones, level: str, reason: str):
    seen = Compaction()
    seen.add(zones)
    risk = judge_zones(zones, seen, Need(GIB))
    assert (risk.level, reason in risk.reason) == (level, True), risk


def test_a_kernel_that_fails_to_compact_is_a_high_risk():
    need = Need(GIB)
    ten = compaction(stalls(100, 50), stalls(105, 52), stalls(110, 54))
    assert ten.attempts == (10, 4)
    assert judge_zones(whole(9), ten, need).level is Level.HIGH
    assert judge_zones(whole(9), compaction(stalls(0, 0), stalls(10, 3)), need).level is Level.LOW
    assert judge_zones(whole(9), compaction(stalls(0, 0), stalls(9, 9)), need).level is Level.LOW
    assert judge_zones(whole(9), compaction(stalls(90, 90)), need).level is Level.LOW  # one reading


def test_compaction_is_counted_over_a_window():
    old = compaction(stalls(0, 0), stalls(50, 50), stalls(50, 50), every_s=40)
    assert old.attempts == (0, 0)  # the 50 are longer ago than a minute
    assert compaction(stalls(5, 5), stalls(2, 2)).attempts is None  # another boot
    assert compaction(stalls(5, 5), stalls(6, 2)).attempts is None
    assert compaction(stalls(1, 1), {}).attempts is None  # a kernel without compaction
    lost = compaction(stalls(1, 1), None)
    assert (lost.attempts, bool(lost.problem)) == (None, True)
    lost.add(Zones(9, PAGE, counters=stalls(3, 3)))
    assert lost.problem == ""


# --- a device allocator ---


def segments(largest: int, free: int, **more: int) -> Segments:
    made = {
        "reserved": GIB + free,
        "allocated": GIB - MIB,
        "internal_free": MIB,
        "external_free": free,
        "blocks_free": free,
        "largest_free": largest,
    }
    return Segments(**made | more)


@pytest.mark.parametrize(
    ("report", "level", "ratio"),
    [
        (segments(0, 0), "low", 0.0),
        (segments(512 * MIB, 512 * MIB), "low", 0.0),
        (segments(256 * MIB, 512 * MIB), "high", 0.5),
        (segments(400 * MIB, 512 * MIB), "low", 0.21875),
        (segments(BLOCK_BYTES, MATERIAL_BYTES - BLOCK_BYTES), "low", 1 - 4 / 252),  # a trifle
        (segments(BLOCK_BYTES, MATERIAL_BYTES), "high", 1 - 4 / 256),
        (segments(256 * MIB, 512 * MIB, reserved=GIB), "unknown", None),  # does not add up
        (segments(256 * MIB, 512 * MIB, allocated=0), "unknown", None),
        (segments(513 * MIB, 512 * MIB), "unknown", None),
        (segments(MIB, 512 * MIB), "unknown", None),
        (segments(0, 512 * MIB), "unknown", None),
        (segments(MIB, 512 * MIB, blocks_free=0), "unknown", None),
        (segments(600 * MIB, 512 * MIB, blocks_free=600 * MIB), "unknown", None),
    ],
)
def test_the_risk_of_a_device_allocator(report: Segments, level: str, ratio: float | None):
    risk = judge_segments(report)
    assert (risk.level, risk.ratio) == (level, ratio)
    assert risk.reason


# --- the ladder ---


class Ladder(Drive):
    """One guarded client, pid 7, whose model is loaded and can be recycled."""

    def __init__(self) -> None:
        super().__init__(engine('[memory]\nreserve = "1GiB"\nbudget = "8GiB"\n'))
        self.worker = self.loaded(7, "llama", 300 * MB, recycle=True)

    def read(self, zones: Zones, after_s: float = 2.0) -> list[Action]:
        """A new reading of the free lists, after a while."""
        self.now_s += after_s
        shot = replace(look(self.now_s), zones=replace(zones, taken_s=self.now_s))
        self.last = self.engine.observe(shot, self.now_s)
        return self.last

    def steps(self) -> list[str]:
        return [str(self.event(name)["step"]) for name in self.events() if name.endswith("_step")]

    def skipped(self) -> list[str]:
        return [
            str(action.fields["step"])
            for action in self.last
            if isinstance(action, Event) and action.name == "fragmentation_step_skipped"
        ]

    def fall_apart(self) -> None:
        """Trouble that lasts: the first step is taken."""
        self.read(crumbs(0))
        assert self.events() == []
        self.read(crumbs(0), DWELL_S)
        assert self.steps() == ["release"]

    def report(self, largest: int, free: int) -> None:
        made = segments(largest, free)
        self.tell(7, "segments", **{name: getattr(made, name) for name in Segments.__slots__})

    def state(self) -> dict[str, Any]:
        known: dict[str, Any] = self.engine.status(self.now_s)["fragmentation"]
        return known


@pytest.fixture
def ladder() -> Ladder:
    return Ladder()


def test_trouble_that_passes_and_unknown_and_small_loads_move_nothing(ladder: Ladder):
    for zones in (crumbs(0), whole(0), crumbs(0), Zones(0, PAGE), machine(0, zone(pages=9))):
        ladder.read(zones, DWELL_S - 1)
        assert ladder.events() == []
    ladder.read(crumbs(0))
    ladder.look()  # a look without a reading, and one with that of before
    ladder.read(crumbs(0), 0)
    assert ladder.events() == []
    assert ladder.engine.state.fragmentation.climb.trouble_since_s == ladder.now_s


def test_the_first_step_asks_the_clients_and_ends_it_when_it_helped(ladder: Ladder):
    ladder.connect(8)  # has no worker: nothing of it is warm
    ladder.fall_apart()
    step = ladder.event("fragmentation_step")
    assert (step["step"], step["of"], step["ratio"]) == ("release", "free lists", 1.0)
    assert ladder.notified("shrink") == [Notify(7, "shrink", {"reason": step["reason"]})]
    assert ladder.state()["step"] == "release"
    ladder.read(crumbs(0), 9)
    assert ladder.events() == []  # it has not had its time
    ladder.read(whole(0), 2)
    assert ladder.events() == ["fragmentation_step_seen", "fragmentation_over"]
    seen = ladder.event("fragmentation_step_seen")
    assert (seen["ratio_before"], seen["ratio_after"], seen["risk"]) == (1.0, 0.0, "low")
    assert ladder.state()["step"] is None
    # it rests, then begins anew
    ladder.read(crumbs(0))
    ladder.read(crumbs(0), REST_S - 10)
    assert ladder.events() == []
    ladder.read(crumbs(0), 20)
    assert ladder.steps() == ["release"]


def test_each_step_waits_for_a_reading_and_the_next_follows(ladder: Ladder):
    ladder.fall_apart()
    ladder.read(crumbs(0, compact_migrate_scanned=5), 10)
    assert ladder.steps() == ["compact"]
    assert [action for action in ladder.last if isinstance(action, Compact)] == [Compact()]
    # nobody compacted; the worker has not been idle for long enough
    ladder.read(crumbs(0, compact_migrate_scanned=5), 30)
    assert "umad-compact.path" in ladder.event("fragmentation_step_seen")["note"]
    assert ladder.skipped() == ["recycle_worker", "recycle_process"]
    assert "fragmentation_stays" in ladder.events()
    ladder.read(crumbs(0), REST_IN_VAIN_S - 10)
    assert ladder.events() == []


def test_the_last_steps_recycle_what_is_idle(ladder: Ladder):
    ladder.loaded(7, "small", 100 * MB, recycle=True)
    ladder.loaded(7, "runtime", 50 * MB, pin=True)  # belongs to no model
    pinned = ladder.loaded(9, "pinned", 900 * MB, recycle=True, pin=True)
    foreign = ladder.loaded(10, "foreign", 900 * MB)  # does not know how
    ladder.read(whole(0))
    ladder.read(whole(0), IDLE_S)
    ladder.fall_apart()
    ladder.read(crumbs(0, compact_migrate_scanned=5), 10)
    ladder.read(crumbs(0, compact_migrate_scanned=6), 30)
    assert ladder.event("fragmentation_step_seen")["note"] == ""
    assert ladder.steps() == ["recycle_worker"]
    [note] = ladder.notified("recycle")
    assert (note.connection, note.params["worker"], note.params["process"]) == (
        7,
        ladder.worker,
        False,
    )
    ladder.read(crumbs(0), 120)
    assert ladder.steps() == ["recycle_process"]
    [note] = ladder.notified("recycle")
    assert (note.connection, note.params["process"]) == (7, True)
    assert note.params["worker"] not in (pinned, foreign)
    ladder.read(crumbs(0), 300)
    assert ladder.events() == ["fragmentation_step_seen", "fragmentation_stays"]
    # not again within a day
    for rest_s, skipped in ((REST_IN_VAIN_S, True), (RECYCLE_REST_S, False)):
        for wait_s in (rest_s, DWELL_S, 10, 30):
            ladder.read(crumbs(0), wait_s)
        assert ladder.skipped() == (["recycle_worker", "recycle_process"] if skipped else [])
        assert ladder.steps() == ([] if skipped else ["recycle_worker"])


def test_a_worker_at_work_is_not_idle(ladder: Ladder):
    done = {"predicted": 0, "peak": 0, "tokens": 1, "batch": 1, "seconds": 1.0}
    ladder.read(whole(0))
    ladder.read(whole(0), IDLE_S - 1)
    ladder.tell(7, "forward_done", worker=ladder.worker, **done)
    ladder.fall_apart()
    ladder.read(crumbs(0), 10)
    ladder.read(crumbs(0), 30)
    assert "recycle_worker" in ladder.skipped()
    lease = ladder.call(7, "admit", worker=ladder.worker, bytes=MB)
    ladder.read(whole(0), IDLE_S)
    ladder.tell(
        7, "forward_done", worker=ladder.worker, lease=lease["lease"], token=lease["token"], **done
    )
    assert ladder.engine.state.fragmentation.idle[ladder.worker][1] == ladder.now_s


def test_a_step_that_cannot_be_verified_is_the_last(ladder: Ladder):
    ladder.fall_apart()
    ladder.read(Zones(0, PAGE, problem="garbage"), 20)
    assert ladder.events() == []
    ladder.read(Zones(0, PAGE, problem="garbage"), UNVERIFIED_S)
    assert ladder.events() == ["fragmentation_unverified"]


def test_without_a_client_there_is_nothing_to_release(ladder: Ladder):
    ladder.engine.disconnected(7, ladder.now_s)
    ladder.read(crumbs(0))
    ladder.read(crumbs(0), DWELL_S)
    assert ladder.skipped() == ["release"]
    assert ladder.steps() == ["compact"]


def test_a_device_allocator_has_its_own_way_up(ladder: Ladder):
    ladder.loaded(8, "other", 100 * MB)
    ladder.report(128 * MIB, 512 * MIB)
    ladder.read(whole(0))
    ladder.read(whole(0), DWELL_S)
    assert [note.connection for note in ladder.notified("shrink")] == [7]
    assert ladder.event("fragmentation_step")["of"] == "device allocator of pid 7"
    [device] = ladder.state()["devices"]
    assert (device["pid"], device["risk"], device["ratio"]) == (7, "high", 0.75)
    ladder.read(whole(0), 20)
    assert ladder.events() == []  # no new report
    ladder.report(150 * MIB, 512 * MIB)
    ladder.read(whole(0), IDLE_S)
    assert ladder.skipped() == ["compact"]
    assert ladder.steps() == ["recycle_worker"]
    ladder.now_s += 1
    ladder.report(512 * MIB, 512 * MIB)
    ladder.read(whole(0), 120)
    assert ladder.events()[-1] == "fragmentation_over"


def test_a_process_that_has_ended_is_no_trouble_any_more(ladder: Ladder):
    ladder.report(128 * MIB, 512 * MIB)
    ladder.read(whole(0))
    ladder.read(whole(0), DWELL_S)
    ladder.exit(7)
    ladder.read(whole(0), 20)
    assert ladder.events()[-1] == "fragmentation_over"


def test_who_reports_segments_must_be_a_worker(ladder: Ladder):
    ladder.connect(8)
    made = segments(0, 0)
    ladder.tell(8, "segments", **{name: getattr(made, name) for name in Segments.__slots__})
    assert ladder.engine.state.counters["refusals_lease_not_found"] == 1


# --- before a large grant, and what is shown ---


@pytest.mark.parametrize(
    ("zones", "size", "told"),
    [
        (whole(0), GIB, None),
        (crumbs(0), GIB - 1, None),
        (crumbs(0), GIB, "high"),
        (whole(0), 3 * GIB, "unknown"),
    ],
)
def test_a_large_load_is_judged_and_granted(
    ladder: Ladder, zones: Zones, size: int, told: str | None
):
    ladder.read(zones)
    ladder.connect(8)
    worker = ladder.call(8, "register", model="big", quota=size)["worker"]
    assert ladder.call(8, "reserve", worker=worker)["bytes"] == size
    events = [name for name in ladder.events() if name == "fragmentation_risk"]
    assert len(events) == (told is not None)
    if told is not None:
        event = ladder.event("fragmentation_risk")
        assert (event["worker"], event["bytes"], event["risk"]) == ("big", size, told)


def test_a_load_that_waits_is_what_the_machine_is_judged_for(ladder: Ladder):
    ladder.read(whole(0))
    assert (ladder.state()["risk"], ladder.state()["need_bytes"]) == ("low", GIB)
    ladder.loaded(8, "full", 6 * GIB)
    ladder.connect(9)
    worker = ladder.call(9, "register", model="next", quota=3 * GIB)["worker"]
    ladder.ask(9, "reserve", worker=worker, wait_s=60)
    assert (ladder.state()["risk"], ladder.state()["need_bytes"]) == ("unknown", 3 * GIB)


def test_what_is_shown(ladder: Ladder):
    unread = ladder.state()
    assert (unread["risk"], unread["ratio"], unread["zones"]) == ("unknown", None, [])
    ladder.read(machine(0, zone(blocks=512), zone(pages=GIB // PAGE, node=1), **stalls(5, 1)))
    ladder.read(machine(0, zone(blocks=512), zone(pages=GIB // PAGE, node=1), **stalls(9, 2)))
    shown = ladder.state()
    assert (shown["risk"], shown["ratio"], shown["block_bytes"]) == ("low", 0.333, 4 * MIB)
    assert shown["compaction"] == {"attempts": 4, "failed": 1}
    first, second = shown["zones"]
    assert (first["node"], first["zone"], first["risk"], first["ratio"]) == (0, "Normal", "low", 0)
    assert (second["risk"], second["ratio"], second["largest"]) == ("high", 1.0, PAGE)
    assert "4.0 MiB" in second["reason"]
    ladder.read(Zones(0, PAGE, problem="garbage"))
    assert (ladder.state()["risk"], ladder.state()["reason"]) == ("unknown", "garbage")


def test_a_kernel_with_small_blocks_is_judged_by_its_largest(ladder: Ladder):
    small = Zones(0, PAGE, (Zone(0, "Normal", (0, 0, 0, 0, 0, 0, 0, 0, 0, 1024), MARKS),))
    ladder.read(small)
    assert (ladder.state()["block_bytes"], ladder.state()["risk"]) == (2 * MIB, "low")


def test_the_kernels_own_kills_are_told(ladder: Ladder):
    ladder.read(replace(whole(0), counters={"oom_kill": 3}))
    assert ladder.events() == []
    ladder.read(replace(whole(0), counters={"oom_kill": 5}))
    assert ladder.event("oom_kill") == {"count": 2}
    assert ladder.engine.state.counters["oom_kills"] == 2
    ladder.read(replace(whole(0), counters=None))
    ladder.read(replace(whole(0), counters={"oom_kill": 9}))
    assert ladder.events() == []
