"""Which account a thread is in, and what is charged to it."""

import pytest

from tests.guard.guarded import TORCH, python

pytestmark = pytest.mark.slow
BLOCKS = """
libc = ctypes.PyDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
page.open(0, 64 * MIB); page.open(1, 64 * MIB)
def used(slot): return page.read(slot).used // MIB
"""


def test_an_account_is_nested_and_set_back() -> None:
    code = """
seen = [current()]
with account(0):
    seen.append(current())
    with account(1):
        seen.append(current())
        with account(SHARED):
            seen.append(current())
        block = libc.malloc(4 * MIB)
    try:
        with account(1):
            raise ValueError
    except ValueError:
        seen.append(current())
    outer = enter(1); leave(outer)
    seen.append(current())
seen += [current(), used(0), used(1)]
libc.free(block)
trim(1)
answer(seen=seen, left=used(1), state=[guard_state().active, guard_state().attached])
"""
    got = python(BLOCKS + code)
    assert got == {"seen": [-1, 0, 1, -1, 0, 0, -1, 0, 4], "left": 0, "state": [True, True]}


def test_threads_and_pools_inherit_and_a_bound_call_carries() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
seen = []
with account(1):
    thread = threading.Thread(target=lambda: seen.append(current()))
    thread.start(); thread.join()
    pool = ThreadPoolExecutor(2)
    seen += pool.map(lambda _: current(), range(4))
seen += [pool.submit(current).result(), pool.submit(bind(0, current)).result()]
thread = threading.Thread(target=lambda: seen.append(current()))
thread.start(); thread.join()
pool.shutdown()
answer(seen=seen)
"""
    assert python(BLOCKS + code)["seen"] == [1, 1, 1, 1, 1, 1, 0, -1]


def test_asyncio_hand_offs_keep_each_account_right() -> None:
    """Tasks that take turns on one thread, calls on a pool's one thread, callbacks and timers."""
    code = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
seen = {0: [], 1: []}
blocks = []
def take(slot):
    seen[slot].append(current())
    blocks.append(libc.malloc(2 * MIB))
async def task(slot, pool, loop):
    for _ in range(3):
        with account(slot): take(slot)          # never across an await
        await asyncio.sleep(0)                  # the other task's turn
        seen[slot].append(current())
        await loop.run_in_executor(pool, bind(slot, take), slot)
        await asyncio.to_thread(bind(slot, take), slot)
        loop.call_soon(bind(slot, take), slot)
        done = asyncio.Event()
        loop.call_later(0, done.set)
        await done.wait()
async def main():
    loop = asyncio.get_running_loop()
    with account(0):
        pool = ThreadPoolExecutor(1)
        await loop.run_in_executor(pool, lambda: None)  # its thread is born in account 0
    await asyncio.gather(task(0, pool, loop), task(1, pool, loop))
    outside = await loop.run_in_executor(None, current)
    pool.shutdown()
    return outside
outside = asyncio.run(main())
timer = threading.Timer(0, bind(1, take), [1]); timer.start(); timer.join()
answer(seen=seen, used=[used(0), used(1)], outside=outside, here=current())
"""
    got = python(BLOCKS + code)
    assert got["seen"] == {"0": [0, -1, 0, 0, 0] * 3, "1": [1, -1, 1, 1, 1] * 3 + [1]}
    assert got["used"] == [24, 26]
    assert (got["outside"], got["here"]) == (-1, -1)


def test_a_generator_is_stepped_inside_and_consumed_outside() -> None:
    code = """
inside, outside = [], []
def steps():
    try:
        for _ in range(3):
            inside.append(current()); yield
    finally:
        inside.append(current())
run = within(1, steps())
next(run); outside.append(current())
next(run); outside.append(current())
run.close(); outside.append(current())
answer(inside=inside, outside=outside, all=len(list(within(0, range(5)))))
"""
    got = python(BLOCKS + code)
    assert got == {"inside": [1, 1, 1], "outside": [-1, -1, -1], "all": 5}


def test_what_is_freed_by_another_account_goes_back_to_its_owner() -> None:
    code = """
with account(0):
    block = libc.malloc(10 * MIB)
before = used(0), used(1)
with account(1):
    libc.free(block)
trim(0)
answer(before=before, after=(used(0), used(1)))
"""
    assert python(BLOCKS + code) == {"before": [10, 0], "after": [0, 0]}


def test_what_has_no_account_is_counted_as_shared() -> None:
    code = """
wait = threading.Event()
def shared():
    beats, deadline = page.beats, time.monotonic() + 5
    while page.beats < beats + 2 and time.monotonic() < deadline:
        wait.wait(0.01)
    return page.shared // MIB
start = shared()
block = libc.malloc(100 * MIB)
held = shared()
libc.free(block)
answer(grew=held - start, left=shared() - start)
"""
    assert python(BLOCKS + code) == {"grew": 100, "left": 0}


@pytest.mark.models
def test_tensors_and_others_are_told_apart_and_torchs_own_threads_inherit() -> None:
    code = """
import numpy
torch.set_num_threads(2)
page.open(0, 512 * MIB)
with account(0):
    tensor = torch.ones(32 << 18)
    array = numpy.ones(16 << 17)
    small = [torch.ones(100) for _ in range(5000)]
    where = account_range(0)
    product = tensor.view(1024, -1) @ tensor.view(-1, 1024)  # OpenMP scratch lands here too
inside = where.tensor_base <= tensor.data_ptr() < where.tensor_base + where.tensor_bytes
outside = not where.tensor_base <= array.ctypes.data < where.tensor_base + where.tensor_bytes
in_range = where.base <= array.ctypes.data < where.base + where.bytes
charged = where.tensor_charged
del tensor, array, small, product
trim(0)
answer(inside=inside, outside=outside, in_range=in_range, tensors=charged / MIB,
       others=where.other_charged / MIB, left=page.read(0).used / MIB)
"""
    got = python(code, prelude=TORCH)
    assert got["inside"]
    assert got["outside"]
    assert got["in_range"]
    assert 34 <= got["tensors"] < 38  # 32 and 5000 x 448 bytes in slabs
    assert 16 <= got["others"] < 24
    assert got["left"] < 8  # scratch memory that the matrix library keeps


@pytest.mark.models
def test_a_few_small_tensors_cost_the_pages_that_they_fill() -> None:
    code = """
page.open(0, 64 * MIB)
with account(0):
    kept = [torch.ones(16 * size) for size in range(1, 17)]  # of 16 sizes, each in its own slab
    few = account_range(0).tensor_charged
    more = [torch.ones(16) for _ in range(300)]
    many = account_range(0).tensor_charged
    del kept, more
left = page.read(0)
trim(0)
answer(few=few // 4096, more=(many - few) // 4096, left=left.used,
       trimmed=account_range(0).tensor_charged)
"""
    got = python(code, prelude=TORCH)
    assert got["few"] == 16
    assert got["more"] == 4  # 301 of 64 bytes
    assert got["left"] > 0
    assert got["trimmed"] == 0


@pytest.mark.models
def test_the_books_are_what_the_kernel_sees() -> None:
    """Five accounts under load: `used` against Rss of their ranges, at most 2 % apart."""
    code = """
import os
def resident(where):
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ")[0]:
            low, _, high = line.split(" ")[0].partition("-")
            inside = where.base <= int(low, 16) < where.base + where.bytes
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
kept = []
generator = torch.Generator().manual_seed(3)
def load(slot):
    with account(slot):
        for _ in range(120):
            rows = int(torch.randint(1, 900, (), generator=generator))
            kept.append(torch.ones(rows, 1024))
            torch.ones(rows, 512)
for slot in range(5):
    page.open(slot, 512 * MIB)
    thread = threading.Thread(target=load, args=(slot,)); thread.start(); thread.join()
pairs = [(page.read(slot).used, resident(account_range(slot))) for slot in range(5)]
for slot in range(5): trim(slot)
trimmed = [(page.read(slot).used, resident(account_range(slot))) for slot in range(5)]
kept.clear()
for slot in range(5): trim(slot)
left = [resident(account_range(slot)) for slot in range(5)]
answer(pairs=pairs, trimmed=trimmed, left=left)
"""
    got = python(code, prelude=TORCH)
    for used, resident in [*got["pairs"], *got["trimmed"]]:
        assert used > 100 << 20
        assert abs(used - resident) <= 0.02 * used
    assert max(got["left"]) <= 64 << 10
