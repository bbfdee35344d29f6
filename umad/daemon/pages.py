"""The account pages of the guarded processes: made, adopted, read and dropped here.

One page a process.  It is writable by the process it describes, so what it says is a claim: a
figure that cannot be true is not passed on, and the worker is judged by its process.

systemd keeps a copy of each page, by a name that says whose it is, and hands it to the next
daemon: so that accounts are known before their workers have come back.  Where there is no
systemd, or its store is full, the workers bring the page themselves.
"""

import os
import re
from collections.abc import Iterator
from typing import Final

from umad.core.state import Member
from umad.errors import ProbeError
from umad.guard.page import SLOTS, AccountPage, AccountReading, AccountState
from umad.host import procs
from umad.host.notify import Notifier, PassedFd
from umad.host.store import boot_id
from umad.values import AccountFigures, Identity, PageFigures

# 8 PiB: above any machine, and a sum over all accounts still is an integer of the wire.
_LIMIT_MAX: Final = 1 << 53
_PREFIX: Final = "page."
_NAME: Final = re.compile(r"page\.(\d{1,10})\.(\d{1,20})\.([0-9a-f]*)")


def is_page(passed: PassedFd) -> bool:
    """Whether what systemd handed over was stored here; else it is a socket."""
    return passed.name.startswith(_PREFIX)


class Pages:
    """Pages by process; the loop's thread is the only one here."""

    def __init__(self, generation: int, notifier: Notifier) -> None:
        self._generation = generation
        self._notifier = notifier
        self._boot = boot_id()
        self._pages: dict[Identity, AccountPage] = {}
        self._stored: set[Identity] = set()
        self._unwanted: list[str] = []  # names that systemd still has to forget

    def take_back(self, passed: PassedFd) -> Identity:
        """Take a page that systemd kept, close what it handed over, and say whose page it is.

        Raises:
            ProbeError: it is of no use, and systemd is told to forget it: that process is gone,
                it was of another boot, or it is no sealed page of our layout.
        """
        try:
            identity = self._owner(passed.name)
            if not procs.is_alive(identity):
                raise ProbeError(f"process {identity.pid} has ended meanwhile")
            self._stored.add(identity)
            self.adopt(identity, passed.fd)
        except ProbeError:
            self._stored -= self._stored - self._pages.keys()
            self._unwanted.append(passed.name)
            self.settle()
            raise
        finally:
            os.close(passed.fd)
        return identity

    def settle(self) -> None:
        """Bring systemd's store up to date, as far as it takes messages; the rest next time."""
        while self._unwanted and self._notifier.remove_fd(self._unwanted[0]):
            del self._unwanted[0]
        if self._unwanted:
            return  # a new page may have the name of an old one
        for identity in self._pages.keys() - self._stored:
            if self._notifier.store_fd(self._name(identity), self._pages[identity].fd):
                self._stored.add(identity)

    def adopt(self, identity: Identity, fd: int) -> bool:
        """Take a page from before a restart of the daemon; False when there is one already.

        Raises:
            ProbeError: it is no account page; the process gets a new one.
        """
        if identity in self._pages:
            return False
        page = AccountPage.from_fd(fd)
        page.adopt(self._generation)
        self._pages[identity] = page
        self.settle()
        return True

    def found(self, identity: Identity) -> PageFigures:
        """What an adopted page says of its accounts; a line that cannot be true is as closed."""
        page = self._pages[identity]
        lines = {slot: page.read(slot) for slot in range(SLOTS)}
        in_use = {slot: line for slot, line in lines.items() if line.state != AccountState.FREE}
        opened = {slot: line for slot, line in in_use.items() if _is_open(line)}
        return PageFigures(
            {slot: line.limit for slot, line in opened.items()},
            frozenset(in_use.keys() - opened.keys()),
            sum(line.used for line in opened.values()),
        )

    def fd(self, identity: Identity) -> int | None:
        """The descriptor of the process's page, to be sent to it."""
        page = self._pages.get(identity)
        return None if page is None else page.fd

    def open(self, identity: Identity, slot: int, limit: int, *, again: bool) -> str:
        """Give an account to a worker; ``again`` where its threads are in it already.

        Returns:
            Why it could not be done, or nothing: out of descriptors, or a page whose process
            writes what it must not.  The worker is then judged by its process.
        """
        try:
            if identity not in self._pages:
                self._pages[identity] = AccountPage.create(self._generation)
                self.settle()
            page = self._pages[identity]
            if again and page.read(slot).state == AccountState.OPEN:
                page.set_limit(slot, limit)
            else:
                page.free(slot)
                page.open(slot, limit)
        except (ProbeError, ValueError) as error:
            return str(error)
        return ""

    def set_limit(self, identity: Identity, slot: int, limit: int) -> None:
        """Change what the guard hands out."""
        if identity in self._pages:
            self._pages[identity].set_limit(slot, limit)

    def close_account(self, identity: Identity, slot: int) -> None:
        """Fence an account: nothing more, and its tensors are taken."""
        if identity in self._pages:
            self._pages[identity].close_account(slot)

    def drop(self, identity: Identity) -> None:
        """The process is gone."""
        page = self._pages.pop(identity, None)
        if page is not None:
            page.close()
            self._stored.discard(identity)
            self._unwanted.append(self._name(identity))
            self.settle()

    def guarded(self, pid: int) -> bool:
        """A guard in that process has attached to its page."""
        return any(page.guarded for owner, page in self._pages.items() if owner.pid == pid)

    def figures(self, members: dict[int, Member]) -> Iterator[tuple[int, AccountFigures]]:
        """What the pages say of these workers; who has none, or lies, is left out."""
        for key, member in members.items():
            slot = member.worker.account
            page = self._pages.get(member.worker.identity)
            if slot is None or page is None or not page.guarded:
                continue
            line = page.read(slot)
            if line.problem:
                continue
            yield (
                key,
                AccountFigures(
                    # What is kept warm for reuse is charged, and given up when it is asked for.
                    used=line.used - line.warm,
                    peak=line.peak,
                    refused=line.refused,
                    returned=line.returned,
                    closed=line.state in (AccountState.CLOSED, AccountState.RETURNED),
                    swept=line.state == AccountState.RETURNED,
                ),
            )

    def close(self) -> None:
        """Unmap all; the processes keep theirs, and systemd its copies for the next daemon."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()

    def _name(self, identity: Identity) -> str:
        return f"{_PREFIX}{identity.pid}.{identity.start_ticks}.{self._boot}"

    def _owner(self, name: str) -> Identity:
        match = _NAME.fullmatch(name)
        if match is None or match[3] != self._boot:
            raise ProbeError(f"{name!r} is no page of this boot")
        return Identity(int(match[1]), int(match[2]))


def _is_open(line: AccountReading) -> bool:
    return line.state == AccountState.OPEN and not line.problem and line.limit <= _LIMIT_MAX
