"""This process's account page: how the client and the guard in it come together.

One page a process, whatever the number of clients: the daemon sends it with the answer to the
first ``register`` that says a guard is here, the guard attaches to it, and after a restart of the
daemon the client brings it back.  Where no guard is active everything here does nothing.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from umad.errors import UmadError
from umad.guard import account
from umad.guard.page import AccountPage, AccountReading

logger = logging.getLogger("umad.client")


class ProcessPage:
    """The page this process is attached to; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: AccountPage | None = None
        self._attach: Callable[[int], None] = account.attach
        state = account.guard_state()
        self._active = state.active
        self.off = "" if state.active else os.environ.get(account.GUARD_OFF) or state.why

    @property
    def active(self) -> bool:
        """A guard is preloaded and can be used."""
        return self._active

    @property
    def fd(self) -> int | None:
        """The page, to be brought to a new daemon; None before the first one came."""
        page = self._page
        return None if page is None else page.fd

    def attach_with(self, attach: Callable[[int], None]) -> None:
        """Have ``attach``, which attaches the guard too, bind this page and every later one.

        For what charges the accounts beside the guard: an allocator for devices.

        Args:
            attach: given the page's descriptor, which stays ours; once more with the same page
                it must do nothing, and where it raises all must be as before.

        Raises:
            UmadError: as ``attach`` raised it; nothing has changed.
        """
        with self._lock:
            if self._page is not None:
                attach(self._page.fd)
            self._attach = attach

    def attach(self, fd: int) -> bool:
        """Attach the guard to the page behind ``fd``, which is closed; False when it cannot."""
        try:
            with self._lock:
                page = AccountPage.from_fd(fd)
                self._attach(fd)
                old, self._page = self._page, page
                if old is not None:
                    old.close()
        except UmadError as error:
            self._active, self.off = False, error.message
            logger.warning("quotas are not enforced in this process: %s", error.message)
            return False
        finally:
            os.close(fd)
        return True

    def used(self, slot: int) -> int:
        """Bytes charged to an account now, without what is kept warm for reuse."""
        line = self._read(slot)
        return 0 if line is None else max(0, line.used - line.warm)

    def refused(self, slot: int) -> int:
        """How many allocations the guard has refused to an account."""
        line = self._read(slot)
        return 0 if line is None else line.refused

    def requested(self, slot: int) -> int:
        """Bytes that the last allocation asked for which the guard refused to an account."""
        line = self._read(slot)
        return 0 if line is None else line.requested

    def _read(self, slot: int) -> AccountReading | None:
        with self._lock:  # the page of a restarted daemon takes this one's place, which is closed
            return None if self._page is None else self._page.read(slot)


process_page: Final = ProcessPage()


def _forked() -> None:
    """In a forked child: the page is the parent's, and so are its accounts."""
    process_page.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forked)
