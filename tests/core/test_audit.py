from dataclasses import replace

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, identity, process, snapshot
from umad.core.audit import ProcessBooks, StillThere, headroom, reserve_of, still_there
from umad.core.ledger import Pool
from umad.units import GIB
from umad.values import PoolReading, ProcessReading, Reading, Snapshot


def unified(safe_gtt: int, gpu_bytes: int) -> Snapshot:
    """An APU: GTT is carved from the system's DRAM; pid 7 holds GPU pages only."""
    plain = snapshot(1.0)
    gtt = PoolReading(
        "gtt",
        Reading.of(12 * GIB, "mem_info_gtt_total"),
        Reading.of(gpu_bytes, "mem_info_gtt_used"),
        Reading.of(safe_gtt, "gtt"),
        "kfd_ttm",
        parent="system",
    )
    return replace(
        plain,
        pools={**plain.pools, "gtt": gtt},
        processes={identity(7): process(7, 0, gpu=gpu_bytes)},
    )


def test_the_reserve_is_the_larger_of_4_gib_and_4_percent() -> None:
    assert reserve_of(16 * GIB, "system", None) == 4 * GIB
    assert reserve_of(200 * GIB, "system", None) == 8 * GIB
    assert reserve_of(16 * GIB, "system", MB) == MB
    assert reserve_of(25 * GIB, "vram", MB) == GIB


def test_a_gtt_grant_consumes_system_memory_too() -> None:
    drive = Drive(engine())
    drive.engine.observe(unified(10 * GIB, 0), 1.0)
    assert drive.engine.state.ledger.pools["gtt"] == Pool("gtt", 12 * GIB, "system")
    worker = drive.loaded(7, "llama", 1500 * MB, pool="gtt")
    assert (drive.booked(), drive.engine.state.ledger.booked("gtt")) == (1500 * MB, 1500 * MB)
    error = drive.refused(7, "admit", worker=worker, bytes=600 * MB)
    assert error.details["binding"] == "budget"


def test_gpu_pages_count_as_used_of_the_unified_pool() -> None:
    books = ProcessBooks(
        identity(7),
        0,
        500 * MB,
        0,
        500 * MB,
        500 * MB,
        False,
        (("gtt", 500 * MB), ("system", 500 * MB)),
    )
    seen = unified(10 * GIB, 300 * MB)
    for name in ("gtt", "system"):
        pool = seen.pools[name]
        assert pool.safe.value is not None
        assert headroom(pool, 0, [books], seen).bytes == pool.safe.value - 200 * MB


def test_gpu_pages_count_in_the_pool_they_are_in() -> None:
    """Those of a card's own memory take nothing of the system's."""
    reading = ProcessReading(
        identity(7),
        True,
        Reading.of(9 * GIB, "status+kfd"),
        host_bytes=1 * GIB,
        gpu=(("gtt", 3 * GIB), ("system", 1 * GIB), ("vram", 4 * GIB)),
    )
    size = Reading.of(24 * GIB, "vram")
    seen = unified(10 * GIB, 0)
    pools = {**seen.pools, "vram": PoolReading("vram", size, size, size, "vram")}
    seen = replace(seen, pools=pools, processes={identity(7): reading})
    booked = (("gtt", 5 * GIB), ("system", 8 * GIB), ("vram", 6 * GIB))
    books = ProcessBooks(identity(7), 0, 14 * GIB, 0, 14 * GIB, None, False, booked)
    for name, unused in (("system", 3 * GIB), ("gtt", 2 * GIB), ("vram", 2 * GIB)):
        safe = pools[name].safe.value
        assert safe is not None
        assert headroom(pools[name], 0, [books], seen).bytes == safe - unused


def test_the_tighter_limit_of_the_gpu_binds() -> None:
    drive = Drive(engine())
    drive.engine.observe(unified(GIB + 100 * MB, 0), 1.0)
    drive.connect(7)
    worker = drive.call(7, "register", model="llama", quota=500 * MB, pool="gtt")["worker"]
    error = drive.refused(7, "reserve", worker=worker)
    assert (error.details["pool"], error.details["binding"]) == ("gtt", "kfd_ttm")


def test_an_absent_pool_gives_nothing() -> None:
    pool = PoolReading(
        "vram", Reading.absent("vram"), Reading.absent("vram"), Reading.absent("vram")
    )
    assert headroom(pool, 0, [], snapshot(1.0)).bytes is None


def test_a_capacity_that_breaks_keeps_the_last_budget() -> None:
    drive = Drive(engine())
    broken = snapshot(1.0)
    pool = replace(broken.pools["system"], capacity=Reading.broken("MemTotal", "garbage"))
    drive.engine.observe(replace(broken, pools={"system": pool}), 1.0)
    assert drive.engine.state.ledger.pools["system"].budget == 2 * GIB


def test_what_is_still_there() -> None:
    books = ProcessBooks(identity(7), 20 * MB, 100 * MB, 300 * MB, 150 * MB, None, False, ())
    assert still_there(books, None) is None
    assert still_there(books, process(7, None)) is None
    assert still_there(books, process(7, 0, alive=False)) == StillThere(0, 0)
    assert still_there(books, process(7, 250 * MB)) == StillThere(loads=130 * MB, bursts=80 * MB)
    assert still_there(books, process(7, 50 * MB)) == StillThere(0, 0)
    # 2 % of what was released is noise.
    assert still_there(books, process(7, 126 * MB)) == StillThere(0, 0)
    assert still_there(books, process(7, 127 * MB)) == StillThere(7 * MB, 0)
    # What is above the quotas is not: freed too early, it would be a breach.
    assert still_there(books, process(7, 172 * MB)) == StillThere(52 * MB, 2 * MB)
    busy = replace(books, quotas=100 * MB)
    assert still_there(busy, process(7, 125 * MB)) == StillThere(0, 5 * MB), "nobody is left"
    busy = replace(busy, limit=120 * MB)
    assert still_there(busy, process(7, 125 * MB)) == StillThere(5 * MB, 5 * MB)
