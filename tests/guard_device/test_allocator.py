"""device.c over a fake driver: what is charged, refused and rolled back, and who is credited."""

import ctypes
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.guard_device.rig import MIB, Rig, Row
from umad.guard.page import SLOTS, AccountPage


def used(card: Rig, slot: int = 0) -> int:
    return card.page.read(slot).used


def test_a_block_is_charged_until_the_driver_has_it_back(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    block = card.alloc(4 * MIB)
    assert block
    assert (used(card), card.library.held(0), card.fake("live").value) == (4 * MIB,) * 3
    card.free(block)
    assert (used(card), card.library.held(0), card.fake("live").value) == (0, 0, 0)
    assert card.page.read(0).peak == 4 * MIB


def test_what_would_pass_the_limit_is_refused_without_asking_the_driver(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    assert card.alloc(10 * MIB)
    assert card.alloc(1) is None
    line = card.page.read(0)
    assert (line.used, line.peak, line.refused, line.requested) == (10 * MIB, 10 * MIB, 1, 1)
    assert card.calls == (1, 0)


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_an_impossible_size_is_refused(card: Rig, size: int) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    assert card.alloc(size) is None
    assert card.page.read(0).refused == 1


@pytest.mark.parametrize("size", [0, -1])
def test_no_bytes_are_no_block_and_no_refusal(card: Rig, size: int) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    assert card.alloc(size) is None
    assert (card.page.read(0).refused, card.calls) == (0, (0, 0))


def test_an_error_of_the_driver_is_rolled_back_and_cleared(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    card.fake("fail_malloc", ctypes.c_int).value = 2
    assert card.alloc(MIB) is None
    assert (used(card), card.library.held(0), card.page.read(0).refused) == (0, 0, 0)
    assert (card.driver_error, card.library.failures()) == (0, 1)


def test_a_device_that_is_full_is_rolled_back(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    card.fake("capacity").value = 3 * MIB
    assert card.alloc(2 * MIB)
    assert card.alloc(2 * MIB) is None
    assert used(card) == 2 * MIB


def test_a_block_the_driver_does_not_take_back_stays_charged(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    block = card.alloc(MIB)
    card.fake("fail_free", ctypes.c_int).value = 700
    card.free(block)
    assert (used(card), card.driver_error, card.library.failures()) == (MIB, 0, 1)


def test_another_threads_free_credits_the_owner(card: Rig) -> None:
    card.attach(10 * MIB, 10 * MIB)
    card.library.enter(0)
    mine = card.alloc(3 * MIB)

    def other() -> None:
        card.library.enter(1)
        assert card.alloc(2 * MIB)
        card.free(mine)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    assert (used(card, 0), used(card, 1)) == (0, 2 * MIB)


def test_the_account_is_the_threads_own_and_leave_restores_it(card: Rig) -> None:
    card.attach(10 * MIB, 10 * MIB)
    outer = card.library.enter(0)
    inner = card.library.enter(1)
    card.alloc(MIB)
    card.library.leave(inner)
    card.alloc(2 * MIB)
    card.library.leave(outer)
    card.alloc(4 * MIB)
    assert (used(card, 0), used(card, 1), card.library.held(-1)) == (2 * MIB, MIB, 4 * MIB)


def test_without_an_account_nothing_is_refused_and_all_is_counted(card: Rig) -> None:
    assert card.library.reading(0) is None
    card.library.enter(0)  # before attach: stays shared
    block = card.alloc(1 << 40)
    assert block
    assert card.library.held(-1) == 1 << 40
    card.free(block)
    assert card.library.held(-1) == 0


def test_a_closed_account_refuses_and_still_takes_back(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    block = card.alloc(MIB)
    card.page.close_account(0)
    assert card.alloc(1) is None
    card.free(block)
    assert (used(card), card.page.read(0).refused) == (0, 1)


def test_a_thread_of_a_former_holder_is_shut_out(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    card.page.free(0)
    card.page.open(0, 10 * MIB)
    assert card.alloc(MIB) is None
    card.library.enter(0)
    assert card.alloc(MIB)


def test_a_lowered_limit_refuses_what_comes_next(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    assert card.alloc(4 * MIB)
    card.page.set_limit(0, 3 * MIB)
    assert card.alloc(1) is None
    assert used(card) == 4 * MIB


def test_a_block_that_is_freed_twice_or_not_ours_changes_nothing(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    block = card.alloc(MIB)
    card.free(block)
    card.free(block)
    card.free(0x7F00DEAD0000)
    card.free(None)
    assert (used(card), card.calls, card.library.failures()) == (0, (1, 1), 2)


def test_the_block_is_made_on_the_device_asked_for(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    assert card.alloc(MIB, device=2)
    assert card.fake("malloc_device", ctypes.c_int).value == 2
    assert card.current_device == 0
    assert card.alloc(MIB, device=9) is None  # no such device: as any error of the driver
    assert (used(card), card.driver_error, card.current_device) == (MIB, 0, 0)


def test_a_new_page_gets_what_is_held(card: Rig) -> None:
    card.attach(10 * MIB, 10 * MIB)
    card.library.enter(1)
    block = card.alloc(3 * MIB)
    fresh = AccountPage.create(2)
    fresh.open(0, 10 * MIB)
    fresh.open(1, 10 * MIB)
    assert card.library.attach(fresh.fd) == 0
    assert (fresh.read(0).used, fresh.read(1).used) == (0, 3 * MIB)
    card.free(block)
    assert fresh.read(1).used == 0
    assert card.library.attach(fresh.fd) == 0  # again: nothing happens
    fresh.close()


def test_in_a_new_page_who_was_fenced_out_stays_out(card: Rig) -> None:
    card.attach(10 * MIB, 10 * MIB)
    card.page.free(0)
    card.page.open(0, 10 * MIB)  # so that its sequence is 2
    card.page.close_account(1)
    fresh = AccountPage.create(2)
    card.library.enter(0)
    open_thread = card.library.enter(1)
    for slot in (0, 1):
        fresh.open(slot, 10 * MIB)
    assert card.library.attach(fresh.fd) == 0
    assert card.alloc(MIB) is None
    card.library.leave(open_thread)
    assert card.alloc(MIB)
    assert (fresh.read(0).used, fresh.read(1).refused) == (MIB, 1)
    fresh.close()


def test_what_is_no_page_is_refused_and_the_old_one_kept(card: Rig, tmp_path: Path) -> None:
    card.attach(10 * MIB)
    (tmp_path / "page").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "page", os.O_RDWR)
    assert card.library.attach(fd) < 0
    os.close(fd)
    blank = AccountPage.create(3)
    os.pwrite(blank.fd, b"UMADPAGX", 0)
    assert card.library.attach(blank.fd) < 0
    blank.close()
    card.library.enter(0)
    assert card.alloc(MIB)
    assert used(card) == MIB


@pytest.mark.parametrize("slot", [SLOTS, -2, 1 << 20])
def test_a_slot_that_does_not_exist_is_no_account(card: Rig, slot: int) -> None:
    card.attach(10 * MIB)
    card.library.enter(slot)
    assert card.alloc(MIB)
    assert (card.library.held(-1), card.library.held(slot)) == (MIB, 0)
    assert card.library.reading(slot) is None


def test_eight_threads_never_pass_the_limit(card: Rig) -> None:
    limit = 64 * MIB
    card.attach(limit, limit)
    shelf: list[int] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        card.library.enter(seed % 2)
        start.wait()
        for _ in range(400):
            block = card.alloc(chance.randrange(1, 24 * MIB))
            if block:
                shelf.append(block)
            if shelf and chance.random() < 0.6:
                try:
                    card.free(shelf.pop(chance.randrange(len(shelf))))
                except (IndexError, ValueError):  # another thread was faster
                    continue

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    lines = [card.page.read(slot) for slot in (0, 1)]
    assert all(line.refused > 10 and limit / 2 < line.peak <= limit for line in lines)
    assert card.fake("high").value <= 2 * limit
    assert sum(line.used for line in lines) == card.fake("live").value
    for block in shelf:
        card.free(block)
    assert (used(card, 0), used(card, 1), card.fake("live").value) == (0, 0, 0)


def test_a_child_credits_nothing_to_its_parent(card: Rig) -> None:
    card.attach(10 * MIB)
    card.library.enter(0)
    block = card.alloc(2 * MIB)
    child = os.fork()
    if child == 0:  # no assert here: it must end without pytest
        card.free(block)
        lost = card.library.reading(0) is not None or not card.alloc(64 * MIB)
        os._exit(1 if lost else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert used(card) == 2 * MIB


def test_spin_scheduling_keeps_the_other_flags_and_the_current_device(card: Rig) -> None:
    flags = (ctypes.c_uint * 4).in_dll(card._driver, "fake_flags")
    assert card.library.spin(2) == 0
    assert list(flags) == [8, 8, 9, 8]
    assert card.current_device == 0
    card.fake("fail_flags", ctypes.c_int).value = 36
    assert card.library.spin(1) == 36
    assert card.driver_error == 0


def test_peer_access_is_enabled_once_where_it_can_be(card: Rig) -> None:
    peers = card.fake("peers", Row * 4)
    assert [card.library.peer(1, 3), card.library.peer(1, 3)] == [0, 0]
    assert (list(peers[1]), card.driver_error, card.current_device) == ([0, 0, 0, 1], 0, 0)
    assert card.library.failures() == 0  # that it was enabled before is none
    card.fake("can_access", ctypes.c_int).value = 0
    assert card.library.peer(2, 3) == 0
    assert list(peers[2]) == [0, 0, 0, 0]


def test_a_peer_that_is_refused_or_does_not_exist_is_the_drivers_error(card: Rig) -> None:
    card.fake("fail_peer", ctypes.c_int).value = 711
    assert card.library.peer(0, 1) == 711
    assert card.library.peer(0, 9) == 1
    assert (card.driver_error, card.library.failures()) == (0, 2)
