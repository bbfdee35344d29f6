"""What the shell itself knows and is asked for: it decides nothing and needs no engine's word.

Owns the greeting, the one reading of the tape, and the daemon's own part of a status: its start,
and what the preflight found.  Stays out: what the figures are (metrics.py, timeline.py), who may
ask (core), and every other method, which is the engine's.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from umad import __version__
from umad.core.tape import RecordedEngine
from umad.daemon.metrics import MEDIA_TYPE, Metrics
from umad.daemon.recording import Recording
from umad.daemon.timeline import Timeline
from umad.errors import VersionMismatch
from umad.wire.frames import Limits
from umad.wire.messages import PROTOCOL_VERSION


class Answers:
    """See the module.

    Args:
        engine: whose tape and state are shown.
        now_s: the loop's clock.
        preflight: what was found before the start, by kind.
        guarded: says whether a guard is active in a process, by pid.
    """

    def __init__(
        self,
        engine: RecordedEngine,
        now_s: Callable[[], float],
        *,
        metrics: Metrics,
        timeline: Timeline,
        preflight: Mapping[str, Sequence[str]],
        guarded: Callable[[int], bool],
    ) -> None:
        self._state = engine.state
        self._now_s = now_s
        self._started_s = now_s()
        self._metrics = metrics
        self._timeline = timeline
        self._recording = Recording(engine.tape)
        self._preflight = preflight
        self._guarded = guarded

    def of(
        self, connection: int, method: str, params: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """The answer to a request; None where it is the engine's to answer.

        Raises:
            RequestRejected: it cannot be answered.
        """
        match method:
            case "hello":
                return self._hello(connection, params)
            case "metrics":
                return {"gzip": self._metrics.compressed(), "type": MEDIA_TYPE}
            case "snapshot":
                return self._recording.part(connection, params["part"], self._now_s())
            case "timeline":
                return self._timeline.answer(params["since"])
        return None

    def completed(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """An engine's answer as it is sent: what only the shell knows is added to a status."""
        if "pools" in result:
            for process in result["processes"]:
                process["guard"] = self._guarded(process["pid"])
            settings = self._state.settings
            return {
                "daemon": {
                    "version": __version__,
                    "pid": os.getpid(),
                    "uptime_s": round(self._now_s() - self._started_s, 1),
                    "socket": settings.daemon.socket,
                    "conservative": settings.memory.conservative,
                    **self._preflight,
                },
                **result,
            }
        return result

    def forget(self, connection: int) -> None:
        """This connection has ended: another may read the tape."""
        self._recording.forget(connection)

    def _hello(self, connection: int, params: Mapping[str, Any]) -> dict[str, Any]:
        if PROTOCOL_VERSION not in params["versions"]:
            raise VersionMismatch(
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, the client "
                f"{params['versions']}"
            )
        self._state.clients[connection].name = params["client"]
        limits = Limits()
        return {
            "version": PROTOCOL_VERSION,
            "daemon": f"umad {__version__}",
            "generation": self._state.generation,
            "recovering": self._state.recovering(self._now_s()),
            "limits": {
                "message_bytes": limits.message_bytes,
                "open_requests": limits.open_requests,
            },
        }
