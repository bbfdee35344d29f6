"""Bytes beyond the steady quota: a burst lease, and the forward pass that needs it."""

import weakref
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from umad.client.mailbox import Hold, leak
from umad.client.memory import process_bytes

if TYPE_CHECKING:
    from umad.client.blocking import Client
    from umad.client.worker import Worker


class Burst:
    """A burst lease; ``release`` it, or use it in a ``with`` statement."""

    def __init__(self, client: "Client", hold: Hold) -> None:
        self._client = client
        self._hold = hold
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

    def detach(self) -> Hold | None:
        """Hand the lease to the caller, who ends it; None when it has ended."""
        return None if self._finalizer.detach() is None else self._hold

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
        peak: bytes beyond the steady quota at most; by default what the process grew by when
            ``bytes`` were asked for, else 0.
    """

    __slots__ = ("_before", "_burst", "_bytes", "_predicted", "_running", "_start_s",
                 "_wait_s", "_worker", "batch", "peak", "tokens")  # fmt: skip

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
        self._before = 0
        self.tokens = tokens
        self.batch = batch
        self.peak: int | None = None

    def __enter__(self) -> Self:
        if self._bytes:
            self._burst = self._worker.admit(self._bytes, wait_s=self._wait_s)
            self._before = process_bytes()
        else:
            self._worker.check_revoked()
        self._running = self._worker.running()
        self._running.__enter__()
        self._start_s = perf_counter()
        return self

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
            self._report(seconds)
        if kind is None:
            self._worker.check_revoked()

    def _report(self, seconds: float) -> None:
        burst, self._burst = self._burst, None
        if self.peak is None:
            self.peak = 0 if burst is None else max(process_bytes() - self._before, 0)
        report: dict[str, Any] = {
            "predicted": int(self._predicted),
            "peak": int(self.peak),
            "tokens": int(self.tokens),
            "batch": int(self.batch),
            "seconds": seconds,
        }
        if burst is None:
            self._worker.report("forward_done", report)
        else:
            self._worker.finish(burst, report)
