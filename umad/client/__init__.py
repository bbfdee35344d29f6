"""The library that worker code calls.

``connect`` gives a ``Client``; its ``worker`` gives a ``Worker``, which loads a model within its
quota, admits bursts and reports forwards.  Blocking, thread-safe, without asyncio or torch.

Under the guard a worker's memory is its own: it is refused and taken back without regard to who
else looks at it.  So a tensor that another worker may use (a cache of the module, a result that
is handed on) is made under ``with shared():``.  ``settle`` after the imports makes loads and
unloads quick.
"""

from umad.client.blocking import DEFAULT_SOCKET, Client, connect
from umad.client.burst import Burst, Forward
from umad.client.memory import settle, shared
from umad.client.worker import Worker
from umad.errors import (
    AccessDenied,
    DaemonLost,
    DaemonTimeout,
    DaemonUnavailable,
    InvalidParams,
    NeverFits,
    Overloaded,
    QuotaDenied,
    QuotaExceeded,
    RequestRejected,
    UmadError,
    WaitedTooLong,
    WorkerRevoked,
)

__all__ = [
    "DEFAULT_SOCKET",
    "AccessDenied",
    "Burst",
    "Client",
    "DaemonLost",
    "DaemonTimeout",
    "DaemonUnavailable",
    "Forward",
    "InvalidParams",
    "NeverFits",
    "Overloaded",
    "QuotaDenied",
    "QuotaExceeded",
    "RequestRejected",
    "UmadError",
    "WaitedTooLong",
    "Worker",
    "WorkerRevoked",
    "connect",
    "settle",
    "shared",
]
