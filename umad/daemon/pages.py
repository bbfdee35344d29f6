"""The account pages of the guarded processes: made, adopted, read and dropped here.

One page a process.  It is writable by the process it describes, so what it says is a claim: a
figure that cannot be true is not passed on, and the worker is judged by its process.
"""

from collections.abc import Iterator

from umad.core.state import Member
from umad.errors import ProbeError
from umad.guard.page import AccountPage, AccountState
from umad.values import AccountFigures, Identity


class Pages:
    """Pages by process; the loop's thread is the only one here."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._pages: dict[Identity, AccountPage] = {}

    def adopt(self, identity: Identity, fd: int) -> None:
        """Take the page that a process brings from before a restart of the daemon.

        Raises:
            ProbeError: it is no account page; the process gets a new one.
        """
        if identity not in self._pages:
            page = AccountPage.from_fd(fd)
            page.adopt(self._generation)
            self._pages[identity] = page

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
        """Unmap all; the processes keep theirs."""
        for identity in list(self._pages):
            self.drop(identity)
