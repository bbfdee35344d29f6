"""The library that worker code calls.

``connect`` gives a ``Client``; its ``worker`` gives a ``Worker``, which loads a model within its
quota, admits bursts and reports forwards.  Blocking, thread-safe, without asyncio or torch.
"""

from umad.client.blocking import DEFAULT_SOCKET, Client, connect
from umad.client.burst import Burst, Forward
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
]
