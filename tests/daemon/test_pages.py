"""Account pages in the daemon's hands, and in those of a process that lies."""

import os
import socket
from collections.abc import Iterator

import pytest

from umad.core.state import Member
from umad.daemon.pages import Pages
from umad.errors import ProbeError
from umad.guard.page import ACCOUNT_OFFSETS, HEADER_OFFSETS, LINE_BYTES, AccountPage, AccountState
from umad.host.notify import Notifier, PassedFd
from umad.host.procs import process_identity
from umad.host.store import boot_id
from umad.units import MIB
from umad.values import Identity, Worker

WHO = Identity(7, 700)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages(3, Notifier({}))
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
    assert pages.adopt(WHO, before.fd)
    assert not pages.adopt(WHO, before.fd)  # each of its workers brings it
    assert pages.open(WHO, 4, 6 * MIB, again=True) == ""
    reading = before.read(4)
    assert (reading.limit, reading.sequence) == (6 * MIB, sequence)
    assert before.generation == 3
    # A slot that says something else than it should is opened anew.
    write(before.fd, line(4, "state"), AccountState.RETURNED, 4)
    assert pages.open(WHO, 4, 6 * MIB, again=True) == ""
    assert before.read(4).sequence == sequence + 1
    before.close()


# ------------------------------------------------------------- systemd's store


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd hears; ``NOTIFY_SOCKET`` names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("")
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + sock.getsockname()[1:].decode())
        yield sock


@pytest.fixture
def stored(manager: socket.socket) -> Iterator[Pages]:
    notifier = Notifier(dict(os.environ))
    made = Pages(3, notifier)
    yield made
    made.close()
    notifier.close()


def heard(manager: socket.socket) -> list[tuple[str, list[int]]]:
    """Each message's words and the inodes that came with it."""
    messages: list[tuple[str, list[int]]] = []
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
        except BlockingIOError:
            return messages
        inodes = [os.fstat(fd).st_ino for fd in fds]
        for fd in fds:
            os.close(fd)
        messages.append((data.decode(), inodes))


def name_of(identity: Identity) -> str:
    return f"page.{identity.pid}.{identity.start_ticks}.{boot_id()}"


def me() -> Identity:
    found = process_identity(os.getpid())
    assert found is not None
    return found


def kept(name: str, page: AccountPage) -> PassedFd:
    """What systemd hands to the next daemon: a descriptor of its own."""
    return PassedFd(name, os.dup(page.fd))


def test_systemd_keeps_each_page_until_its_process_is_gone(
    manager: socket.socket, stored: Pages
) -> None:
    stored.open(WHO, 0, MIB, again=False)
    stored.open(WHO, 1, MIB, again=False)
    fd = stored.fd(WHO)
    assert fd is not None
    name = name_of(WHO)
    assert heard(manager) == [(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [os.fstat(fd).st_ino])]
    stored.drop(WHO)
    assert heard(manager) == [(f"FDSTOREREMOVE=1\nFDNAME={name}", [])]
    stored.open(WHO, 0, MIB, again=False)
    heard(manager)
    stored.close()  # the daemon ends, and the page is for the next one
    assert heard(manager) == []


def test_what_systemd_does_not_take_is_told_again(manager: socket.socket, stored: Pages) -> None:
    clogging = Notifier(dict(os.environ))
    while clogging.ready():
        pass
    clogging.close()
    stored.open(WHO, 0, MIB, again=False)
    stored.drop(WHO)
    stored.open(WHO, 0, MIB, again=False)
    assert all(words == "READY=1" for words, _ in heard(manager))
    stored.settle()
    words = [words.split("\n")[0] for words, _ in heard(manager)]
    assert words == ["FDSTOREREMOVE=1", "FDSTORE=1"]
    stored.settle()
    assert heard(manager) == []


def test_a_new_page_waits_until_the_old_one_of_its_name_is_forgotten(
    manager: socket.socket, stored: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.open(WHO, 0, MIB, again=False)
    heard(manager)
    with monkeypatch.context() as busy:
        busy.setattr(Notifier, "remove_fd", lambda *_: False)
        stored.drop(WHO)
        stored.open(WHO, 0, MIB, again=False)
        assert heard(manager) == []
    stored.settle()
    assert [words.split("=")[0] for words, _ in heard(manager)] == ["FDSTOREREMOVE", "FDSTORE"]


def test_a_page_that_systemd_kept_is_found_again(manager: socket.socket, stored: Pages) -> None:
    before = AccountPage.create(generation=2)
    for slot, limit in ((0, 5 * MIB), (2, 7 * MIB), (4, 9 * MIB), (6, MIB), (8, MIB)):
        before.open(slot, limit)
    before.close_account(4)
    before.free(6)
    write(before.fd, line(2, "used"), MIB)
    write(before.fd, line(8, "limit"), 1 << 60)  # no daemon wrote that
    write(before.fd, HEADER_OFFSETS["guard"], 2, 4)
    passed = kept(name_of(me()), before)
    assert stored.take_back(passed) == me()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed.fd)
    found = stored.found(me())
    assert (found.limits, found.fenced, found.used) == (
        {0: 5 * MIB, 2: 7 * MIB},
        frozenset({4, 8}),
        MIB,
    )
    assert stored.guarded(os.getpid())
    assert before.generation == 3
    stored.set_limit(me(), 0, 0)  # the same memory, not a copy
    assert before.read(0).limit == 0
    assert not stored.adopt(me(), before.fd)
    assert heard(manager) == []  # systemd has it
    before.close()


@pytest.mark.parametrize(
    "name",
    [
        f"page.{os.getpid()}.1.{boot_id()}",  # another process has this pid now
        f"page.{me().pid}.{me().start_ticks}.{'0' * 32}",  # of another boot
        "page.7",
        "page.",
    ],
)
def test_a_page_of_nobody_is_forgotten(manager: socket.socket, stored: Pages, name: str) -> None:
    before = AccountPage.create(generation=2)
    with pytest.raises(ProbeError):
        stored.take_back(kept(name, before))
    assert heard(manager) == [(f"FDSTOREREMOVE=1\nFDNAME={name}", [])]
    assert before.generation == 2
    before.close()


def test_what_was_kept_and_is_no_page_is_forgotten(manager: socket.socket, stored: Pages) -> None:
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ProbeError, match="not sealed"):
        stored.take_back(PassedFd(name_of(me()), unsealed))
    assert [words for words, _ in heard(manager)] == [f"FDSTOREREMOVE=1\nFDNAME={name_of(me())}"]
    stored.open(me(), 0, MIB, again=False)  # and the process gets a new one, which is kept
    assert len(heard(manager)) == 1


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
