"""Every error umad raises or sends, in one tree.

Owns the one table that ties an error code to its class, its HTTP status and the exit code of a
program that ends with it: the class attributes below.  A leaf has a ``code`` of its own; a test
walks every leaf.  Core returns refusals as values; the wire carries them as maps
(``UmadError.to_wire``); only ``client`` turns them back into exceptions (``from_wire``).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final


class UmadError(Exception):
    """Base of all errors of umad; never raised itself.

    Args:
        message: what was wrong, where, and what to do, for a person.
        retry_after_s: when asking again may help, in seconds; None where it is not known.
        details: plain values for programs (what was asked, what is free, who holds it).
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.details: dict[str, Any] = dict(details or {})

    def to_wire(self) -> dict[str, Any]:
        """The error map of wire/PROTOCOL.md."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "retry_after_s": self.retry_after_s,
            "details": self.details,
        }


class ConfigError(UmadError):
    """The configuration cannot be used; the writer's fault.  ``details["problems"]`` lists all.

    Mend the lines it names; nothing was started or changed.
    """

    code = "config"
    exit_code = 78  # EX_CONFIG of sysexits.h


class PreflightError(UmadError):
    """The machine is not set up for umad; the message holds the commands that mend it."""

    code = "preflight"
    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


class DaemonUnavailable(UmadError):
    """The daemon cannot be reached; nobody's fault until the message says more.

    Start it (``systemctl start umad``), or decide without it (``on_unavailable``).
    """

    code = "arbiter_unavailable"
    retryable = True
    http_status = 503
    exit_code = 3


class DaemonTimeout(DaemonUnavailable):
    """The daemon did not answer within the call's deadline; what became of it is unknown."""

    code = "arbiter_timeout"


class DaemonLost(DaemonUnavailable):
    """The connection ended while a call was under way; the client reconnects by itself."""

    code = "arbiter_lost"


class RequestRejected(UmadError):
    """A request was understood and refused; nothing was changed.  Never raised itself."""

    code = "rejected"
    http_status = 400


class InvalidParams(RequestRejected):
    """A parameter is missing, of the wrong type or out of range; the caller's fault."""

    code = "invalid_params"


class UnknownMethod(RequestRejected):
    """The daemon has no such method; compare the versions in ``hello``."""

    code = "unknown_method"
    http_status = 404


class VersionMismatch(RequestRejected):
    """The two sides share no protocol version; update the older one."""

    code = "version_mismatch"


class AccessDenied(RequestRejected):
    """The peer's uid and groups do not allow this; join the group that the message names."""

    code = "access_denied"
    http_status = 403
    exit_code = 4


class LeaseNotFound(RequestRejected):
    """No such lease or worker of this owner (any more); register again."""

    code = "lease_not_found"
    http_status = 409


class LeaseExpired(RequestRejected):
    """The lease passed its deadline and was ended; its bytes are no longer yours."""

    code = "lease_expired"
    http_status = 409


class Fenced(RequestRejected):
    """A newer holder or a newer daemon generation exists; this token counts no more."""

    code = "fenced"
    http_status = 409


class NameTaken(RequestRejected):
    """Another live worker has this model and instance; choose another instance."""

    code = "name_taken"
    retryable = True
    http_status = 409


class NeverFits(RequestRejected):
    """More was asked than the pool can ever give; ask for less or change the quotas."""

    code = "never_fits"
    http_status = 413


class BodyTooLarge(RequestRejected):
    """A request body passed its limit while it was read."""

    code = "body_too_large"
    http_status = 413


class BodyTimeout(RequestRejected):
    """A request body did not arrive in time; the client's or its network's fault."""

    code = "body_timeout"
    http_status = 408


class QuotaDenied(RequestRejected):
    """There is no room now; ``details`` says what was asked, what is free and who holds it."""

    code = "quota_denied"
    retryable = True
    http_status = 503


class Drained(RequestRejected):
    """People have stopped new loads (``umadctl drain``); ``umadctl resume`` lets them begin."""

    code = "drained"
    retryable = True
    http_status = 503


class MemoryUnknown(RequestRejected):
    """Memory cannot be read just now, so nothing new is granted; it recovers by itself."""

    code = "memory_unknown"
    retryable = True
    http_status = 503


class Recovering(RequestRejected):
    """The daemon has just started and first lets its former workers come back."""

    code = "recovering"
    retryable = True
    http_status = 503


class WaitedTooLong(RequestRejected):
    """The wait in a queue passed its bound."""

    code = "waited_too_long"
    retryable = True
    http_status = 429


class Overloaded(RequestRejected):
    """A queue or a per-peer limit is full; the load must shrink first."""

    code = "overloaded"
    retryable = True
    http_status = 429


class WorkerRevoked(RequestRejected):
    """This worker broke its quota and was told to stop; its results are thrown away."""

    code = "worker_revoked"
    retryable = True
    http_status = 503


class ModelNotFound(RequestRejected):
    """No model of that name is configured."""

    code = "model_not_found"
    http_status = 404


class ModelLoading(RequestRejected):
    """The model is not in memory yet; come back after ``retry_after_s``."""

    code = "model_loading"
    retryable = True
    http_status = 503


class ModelFailed(RequestRejected):
    """The model could not be loaded or its worker failed; the message says why."""

    code = "model_failed"
    retryable = True
    http_status = 503


class WorkerLost(RequestRejected):
    """The inference process ended while it worked on this request; ask again."""

    code = "worker_lost"
    retryable = True
    http_status = 503


class QuotaExceeded(RequestRejected, MemoryError):
    """A worker holds or asked for more than its quota; free something or raise the quota."""

    code = "quota_exceeded"
    http_status = 503
    retryable = True


class ProtocolError(UmadError):
    """Bytes or a message broke the protocol.  Never raised itself."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """We tried to send what the protocol forbids: a bug of ours."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; its connection is closed, no other."""

    code = "remote_protocol"
    http_status = 502


class ProbeError(UmadError):
    """A reading of the machine failed; the reading is broken, not zero."""

    code = "probe"
    retryable = True
    http_status = 503


class BadArchive(UmadError):
    """A snapshot's archive is damaged, or was never written by ``umadctl snapshot``."""

    code = "bad_archive"
    exit_code = 65  # EX_DATAERR of sysexits.h


class InvariantBroken(UmadError):
    """The books contradict themselves: a bug of ours.  The daemon logs its state and ends."""

    code = "invariant_broken"
    exit_code = 70  # EX_SOFTWARE of sysexits.h


def leaves(root: type[UmadError] = UmadError) -> list[type[UmadError]]:
    """Every error class that has no subclass, and the parents that are raised themselves."""
    found: list[type[UmadError]] = []
    for child in root.__subclasses__():
        if "code" in vars(child):
            found.append(child)
        found.extend(leaves(child))
    return found


BY_CODE: Final[dict[str, type[UmadError]]] = {leaf.code: leaf for leaf in leaves()}


def from_wire(error: object) -> UmadError:
    """The exception for an error map; an unknown code becomes a ``RequestRejected``."""
    if not isinstance(error, Mapping):
        return RemoteProtocolError(f"the peer sent an error that is no map: {type(error).__name__}")
    code = error.get("code")
    kind = BY_CODE.get(code, RequestRejected) if isinstance(code, str) else RequestRejected
    wait = error.get("retry_after_s")
    details = error.get("details")
    return kind(
        str(error.get("message") or code or "no reason given"),
        retry_after_s=float(wait) if isinstance(wait, int | float) else None,
        details=details if isinstance(details, Mapping) else None,
    )
