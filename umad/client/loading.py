"""A load under way: booked at its peak, alone on the machine, committed at what was measured.

Survives the daemon: a reconnect tells of it (``Bond.bind``), so that a new daemon books it, gives
its account the same limit and it the mutex, and neither its guard nor a neighbour disturbs it.
"""

from typing import TYPE_CHECKING, Any

from umad.client.bond import Binding, Bond
from umad.client.mailbox import Hold
from umad.errors import DaemonLost, DaemonUnavailable

if TYPE_CHECKING:
    from umad.client.blocking import Client


class Load:
    """One load; made by ``reserve``, ended by ``commit`` or ``void``, and ``end`` in any case.

    Attributes:
        hold: its lease.
        mutex: the token of the init mutex, where it has that.
        prefault: its memory is to be touched first (conservative mode).
    """

    def __init__(self, client: "Client", bond: Bond, hold: Hold, *, prefault: bool) -> None:
        self._client, self._bond = client, bond
        self.hold, self.mutex, self.prefault = hold, None, prefault

    @classmethod
    def reserve(
        cls, client: "Client", bond: Bond, size: int, wait_s: float, *, evict: bool
    ) -> "Load":
        """Book its peak, ``size`` bytes.

        Raises:
            QuotaDenied, WaitedTooLong: there was no room in time.
            DaemonUnavailable: no daemon, and the client does not allow that.
        """
        params = {"bytes": size, "wait_s": wait_s, "evict": evict}
        hold, answer = bond.book(bond.require(), "reserve", params)
        return cls(client, bond, hold, prefault=answer.get("prefault", False))

    def begin(self, wait_s: float) -> None:
        """Take the init mutex; from now on a reconnect tells the daemon that this load goes on.

        Raises:
            DaemonLost: the daemon that booked it has gone; nothing was loaded yet.
        """
        bond = self._bond
        binding = bond.require()
        answer = bond.ask(binding, "init_lock", {"wait_s": wait_s})
        mutex = None if answer is None else answer["token"]
        with self._client.lock:
            known = binding is not None and binding.link.generation == self.hold.generation
            if (known and bond.binding is binding) or self._client.on_unavailable == "allow":
                bond.load, self.mutex = self, mutex
                return
        if mutex is not None:
            bond.settle(binding, "init_unlock", {"token": mutex})
        raise DaemonLost(f"the daemon restarted before {bond.name} began to load; load it again")

    def commit(self, model: object, measured: int) -> None:
        """Shrink the booking to what was measured, and bind it to the model.

        Once more where a reconnect came in between: it has told the daemon of the load, or of
        the model where that was here first.

        Raises:
            QuotaExceeded: the model holds more than its quota.
            DaemonUnavailable: no daemon came back, and the client does not allow that.
        """
        hold, client, bond = self.hold, self._client, self._bond
        while True:
            binding = bond.require(client.timeout_s)
            with client.lock:
                told, generation = {**hold.ticket, "measured": measured}, hold.generation
            try:
                if binding is not None:
                    if hold.lease is None or binding.link.generation != generation:
                        self._book_unknown(binding)
                        continue
                    client.call_on(binding.link, "commit", told)
            except DaemonUnavailable:
                if binding is None or binding.link.alive:  # only late: the books may hold it
                    raise
                continue
            with client.lock:
                if hold.generation == generation:
                    hold.bytes = measured
                    bond.kept.keep(model, hold)
                    return

    def _book_unknown(self, binding: Binding) -> None:
        """Book what no daemon knows of: one came, where none was needed, while it was loaded."""
        quota = self._bond.registration["quota"]
        params: dict[str, Any] = {"bytes": quota, "wait_s": self._client.timeout_s, "evict": False}
        booked, answer = self._bond.book(binding, "reserve", params)
        with self._client.lock:
            self.hold.take(booked.generation, answer)

    def void(self) -> None:
        """It has failed, and its bytes are gone."""
        self.hold.ended = True
        self._client.end(self.hold, leaked=False, method="void")

    def end(self) -> None:
        """Give the mutex back."""
        bond = self._bond
        with self._client.lock:
            binding, bond.load = bond.binding, None
            mutex, self.mutex = self.mutex, None
        if mutex is not None:
            bond.settle(binding, "init_unlock", {"token": mutex})
