"""Bytes beyond the steady quota: a burst lease, and the forward pass that needs it."""

import weakref
from time import monotonic, perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from umad.client.mailbox import Hold, leak
from umad.client.meter import Start

if TYPE_CHECKING:
    from umad.client.blocking import Client
    from umad.client.worker import Worker


class Burst:
    """A burst lease; ``release`` it, or use it in a ``with`` statement."""

    def __init__(self, client: "Client", hold: Hold, lasts_s: float) -> None:
        self._client = client
        self._hold = hold
        self._renew_s = monotonic() + lasts_s / 2
        self._finalizer = weakref.finalize(self, leak, hold)
        self._finalizer.atexit = False

    @property
    def bytes(self) -> int:
        """How many bytes it covers."""
        return self._hold.bytes

    @property
    def booked(self) -> bool:
        """False where it was allowed without a daemon."""
        return self._hold.lease is not None

    def release(self) -> None:
        """Give the bytes back; once, however often it is called."""
        if self.detach() is not None:
            self._client.end(self._hold, leaked=False)

    def extend(self) -> None:
        """Say between the steps of long work that it goes on, or the daemon ends the lease in time.

        It asks for more time once half of it has passed; else it costs nothing.
        """
        if monotonic() >= self._renew_s:
            self._renew_s = monotonic() + self._client.extend(self._hold) / 2

    def detach(self) -> Hold | None:
        """Hand the lease to the caller, who ends it; None when it has ended."""
        if self._finalizer.detach() is None:
            return None
        self._hold.ended = True
        return self._hold

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Forward:
    """One forward pass; made by ``Worker.forward``.

    Attributes:
        tokens: reported afterwards; set it when it is known only then.
        batch: as above.
        peak: the most bytes it held beyond what the worker held before it.  Set it where the
            caller knows better (device memory that no guard counts); else it is measured.
        exact: known when it has ended: whether ``peak`` is that, and what the next one of its
            size would take; else it is only what was seen.
    """

    __slots__ = ("_burst", "_bytes", "_predicted", "_running", "_start", "_start_s",
                 "_wait_s", "_worker", "batch", "exact", "peak", "tokens")  # fmt: skip

    def __init__(
        self,
        worker: "Worker",
        size: int | str,
        predicted: int,
        tokens: int,
        batch: int,
        wait_s: float,
    ) -> None:
        self._worker = worker
        self._bytes = size
        self._predicted = predicted
        self._wait_s = wait_s
        self._burst: Burst | None = None
        self._start: Start | None = None
        self.tokens = tokens
        self.batch = batch
        self.peak: int | None = None
        self.exact = False

    def __enter__(self) -> Self:
        if self._bytes:
            self._burst = self._worker.admit(self._bytes, wait_s=self._wait_s)
        else:
            self._worker.check_revoked()
        self._worker.share_cores()
        self._running = self._worker.running()
        self._running.__enter__()
        self._start = self._worker.meter.begin(self._worker.account, coarse=bool(self._bytes))
        self._start_s = perf_counter()
        return self

    def extend(self) -> None:
        """Between two steps of a long forward: see ``Burst.extend``."""
        if self._burst is not None:
            self._burst.extend()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = perf_counter() - self._start_s
        try:
            self._running.__exit__(kind, error, trace)
        finally:
            self._report(seconds, whole=kind is None)
        if kind is None:
            self._worker.check_revoked()

    def _report(self, seconds: float, *, whole: bool) -> None:
        burst, self._burst = self._burst, None
        assert self._start is not None, "a forward is left after it was entered"
        took = self._worker.meter.end(self._start)
        known = self.peak is not None or took.exact
        first = whole and self._worker.meter.is_first(self.tokens * self.batch)
        self.exact = whole and known and not first
        if self.peak is None:
            self.peak = max(took.bytes, self._predicted + 1) if took.refused else took.bytes
        report: dict[str, Any] = {
            "predicted": int(self._predicted),
            "peak": int(self.peak),
            "tokens": int(self.tokens),
            "batch": int(self.batch),
            "exact": self.exact,
            "seconds": seconds,
        }
        if burst is None:
            self._worker.bond.report("forward_done", report)
        else:
            self._worker.finish(burst, report)
