"""Account pages in the daemon's hands, and in those of a process that lies."""

import os
from collections.abc import Iterator

import pytest

from umad.core.state import Member
from umad.daemon.pages import Pages
from umad.errors import ProbeError
from umad.guard.page import ACCOUNT_OFFSETS, HEADER_OFFSETS, LINE_BYTES, AccountPage, AccountState
from umad.units import MIB
from umad.values import Identity, Worker

WHO = Identity(7, 700)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages(generation=3)
    yield made
    made.close()


def members(slot: int | None = 0) -> dict[int, Member]:
    return {1: Member(Worker(1, "llama", 0, WHO, MIB, MIB, account=slot), 5)}


def write(fd: int, offset: int, value: int, size: int = 8) -> None:
    """What the process at the other end does to the page."""
    os.pwrite(fd, value.to_bytes(size, "little"), offset)


def attach(pages: Pages) -> int:
    """As a guard does that has mapped the page."""
    fd = pages.fd(WHO)
    assert fd is not None
    write(fd, HEADER_OFFSETS["guard"], 2, 4)
    return fd


def line(slot: int, field: str) -> int:
    return LINE_BYTES * (slot + 1) + ACCOUNT_OFFSETS[field]


def test_a_page_is_made_once_a_process(pages: Pages) -> None:
    assert pages.fd(WHO) is None
    assert pages.open(WHO, 0, MIB, again=False) == ""
    first = pages.fd(WHO)
    assert pages.open(WHO, 1, MIB, again=False) == ""
    assert pages.fd(WHO) == first
    assert not pages.guarded(7)
    attach(pages)
    assert pages.guarded(7)
    pages.drop(WHO)
    assert pages.fd(WHO) is None


def test_figures_are_read_without_what_is_kept_warm(pages: Pages) -> None:
    pages.open(WHO, 0, 10 * MIB, again=False)
    assert list(pages.figures(members())) == []  # no guard has attached
    fd = attach(pages)
    write(fd, line(0, "used"), 9 * MIB)
    write(fd, line(0, "warm"), 2 * MIB)
    [(key, figures)] = pages.figures(members())
    assert (key, figures.used, figures.closed) == (1, 7 * MIB, False)
    pages.close_account(WHO, 0)
    [(_, figures)] = pages.figures(members())
    assert figures.closed
    assert list(pages.figures(members(None))) == []


@pytest.mark.parametrize(
    ("field", "value", "size"),
    [("used", 1 << 63, 8), ("state", 77, 4), ("warm", 1 << 40, 8), ("returned", 1 << 63, 8)],
)
def test_a_figure_that_cannot_be_true_is_not_used(
    pages: Pages, field: str, value: int, size: int
) -> None:
    pages.open(WHO, 0, MIB, again=False)
    fd = attach(pages)
    write(fd, line(0, field), value, size)
    assert list(pages.figures(members())) == []


def test_a_page_from_before_a_restart_is_adopted_as_it_is(pages: Pages) -> None:
    before = AccountPage.create(generation=2)
    before.open(4, 5 * MIB)
    sequence = before.read(4).sequence
    pages.adopt(WHO, before.fd)
    pages.adopt(WHO, before.fd)  # each of its workers brings it
    assert pages.open(WHO, 4, 6 * MIB, again=True) == ""
    reading = before.read(4)
    assert (reading.limit, reading.sequence) == (6 * MIB, sequence)
    assert before.generation == 3
    # A slot that says something else than it should is opened anew.
    write(before.fd, line(4, "state"), AccountState.RETURNED, 4)
    assert pages.open(WHO, 4, 6 * MIB, again=True) == ""
    assert before.read(4).sequence == sequence + 1
    before.close()


def test_what_is_no_page_is_refused(pages: Pages) -> None:
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 4096)
    try:
        with pytest.raises(ProbeError):
            pages.adopt(WHO, unsealed)
    finally:
        os.close(unsealed)
    assert pages.fd(WHO) is None


def test_an_account_that_cannot_be_opened_is_told_not_raised(pages: Pages) -> None:
    assert "no account 63" in pages.open(WHO, 63, MIB, again=False)
    pages.set_limit(Identity(8, 1), 0, MIB)
    pages.close_account(Identity(8, 1), 0)
