"""The lease of a loaded model, bound to the life of the model."""

import weakref
from typing import Any

from umad.client.mailbox import Hold, leak


class Kept:
    """At most one model and its lease.

    A model that is dropped without ``let_go`` ends its lease by a finalizer, which is told of as
    a leak.  One that cannot be referenced weakly is kept alive here.
    """

    def __init__(self) -> None:
        self._hold: Hold | None = None
        self._model: object = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def live(self) -> Hold | None:
        """The model's lease, unless the model was dropped and a finalizer has ended it."""
        finalizer = self._finalizer
        return self._hold if finalizer is None or finalizer.alive else None

    def keep(self, model: object, hold: Hold) -> None:
        """Bind a lease to a model."""
        try:
            finalizer = weakref.finalize(model, leak, hold)
        except TypeError:
            self._model = model
        else:
            finalizer.atexit = False  # the end of the process says it all
            self._finalizer = finalizer
        self._hold = hold

    def let_go(self) -> Hold | None:
        """Take the lease out of the finalizer's hands; None: it has ended already."""
        hold, self._hold, self._model = self._hold, None, None
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None and finalizer.detach() is None:
            return None  # the model was dropped: the mailbox has it
        return hold
