"""Where decisions are told: the journal with fields, a terminal in words, anything else as JSON.

Owns the stable MESSAGE_ID of each event.  Logging never blocks the loop: what a journal does not
take at once waits, up to a bound.
"""

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal

import structlog
from logging_journald import JournaldTransport, check_journal_stream

from umad.journal import entry, words
from umad.units import printable

Format = Literal["auto", "console", "json", "journal"]
Fields = MutableMapping[str, Any]

# Stable for ever: people grep for them, catalogues explain them.  Made once with uuid4.
MESSAGE_IDS: Final[Mapping[str, str]] = {
    "started": "99d308f0c98947f082a4cf5071586fe5",
    "stopping": "1435261a34fb4a88a7db4078e4c6a8bc",
    "preflight": "d92fa5c1c8c54318b522df8ba85b212b",
    "refused": "a97d1308cf63485b94ecd6ccecae595e",
    "registered": "1accf8b3ed944b2188c4df1e98539826",
    "rejoined": "eef1b66496294a799453306893777798",
    "loaded": "3ce5870e227d43488dd74799903f23a4",
    "unloaded": "6240b41545f9486083038b78dd8d5417",
    "left": "c75a489abba34f498bb69c4f30229fc5",
    "leaked": "20988addd53c4687b8bec73fe1ac5358",
    "exited": "686af176b7204eb0b42ea5d0995489b1",
    "lease_expired": "bb3a9ad207d743748764da5d0dd379ba",
    "init_lock_expired": "f73af46741044e348b958b615931a2b4",
    "leaking": "e3f6a9d04b1c4f7e9a2d5c8b7f0e1d23",
    "quota_set": "f4a7bae15c2d4a8fab3e6d9c8a1f2e34",
    "evicting": "4ef8efcf7b194269bcffd38fe1da8904",
    "evict_cancelled": "61f2c08199154ea8a5d6dbda3d75fbf1",
    "evict_missed": "f133501dcc414016b1f5554ca0b88a1a",
    "drained": "deff223750c74d6c9fed44ee9989150c",
    "resumed": "56247da791ee4e12a944b9b120c2a95e",
    "pinned": "2309fca716fe4f99a7513fe8b39a3ab7",
    "unpinned": "87362525b0124afa8114916bf0385359",
    "admission_closed": "2ac2dc77ca9c41f48d10eefe18acdf7b",
    "admission_opened": "b67166a978c74847ba86b917277a160d",
    "shrinking": "f6df37d6c1ff459c8261ccd692dc0877",
    "reloaded": "0caa7120eb5648b0974536d5c3f20b95",
    "not_reloaded": "24c725cfce9b42b0bc860d658f93ddf0",
    "launched": "3ee1fca0328249cabc310a42b04cdc9d",
    "adopted": "ccdc3422f5314babbf4ded44d174f45f",
    "disowned": "37bd40c8b4ac48899a4405e108bf6d34",
    "not_adopted": "8c9013733416452dacb88dea4f92b41e",
    "adoptions_lost": "57ec003121c04ac99d45d91cd1c0d999",
    "adoptions_not_kept": "3111c519d4ee4e2791cbb0995fcfa893",
    "revoked": "ca248485967849fd9e8e5211883e3cb5",
    "page_found": "00e2c8fee8b94a6a830325b988224762",
    "metrics_not_served": "7e8d6c53800f478cb7827ffdf3c6b9df",
    "page_dropped": "932f6b259ac742d99a5e0f84ad5467bb",
    "accounts_abandoned": "da9da3d1d07c4a4396dc1aaff8f555c4",
    "complied": "bca4a5300b614d6f84c98e764aea8d06",
    "stopped": "8f278dd674924319b1c9502ad7afbf78",
    "migrated": "f9b4072bc706452c9d256b2a75c5c1da",
    "orphaned": "97ed67e173d64243a81bda62adafd3bb",
    "unkillable": "8fca5e003640477aaf02c3bffda461dd",
    "kill_failed": "04bea638157e4676aa32ba2717ebb16e",
    "protocol_violation": "950bce0a058a41c6816965699b8a529d",
    "foreign_sender": "12abd01517a64eaf920a395d159babe2",
    "memory_unknown": "55eeee7c35464ea38e46c66b9a31bd01",
    "memory_known": "3dc1d720eac7469cbfe44d4fa0d0e5fa",
    "memory_not_locked": "24de69bee08a41619b5509e4f629c4d3",
    "no_pressure_alarm": "af1d55ced71e4c28bbdae96e91d403cd",
    "account_failed": "3f254dbe978a4dbbb61a454e3ae953f6",
    "prediction_exceeded": "52cf4116ba254c4196180e9d386c328c",
    "oom_kill": "d4fe7bc48ef94027a9ff23e52058f246",
    "fragmentation_risk": "2e6f1d676a36401fb9736222f36b880a",
    "fragmentation_step": "2c68c328fbeb4eb88676aae6469122c4",
    "fragmentation_step_seen": "b5a7476ebfb24f1bba732b1039e9a3b9",
    "fragmentation_step_skipped": "c41b4ba0402c48ec9f2b1e1a4498a732",
    "fragmentation_over": "3453b2f410344138abb989ad7948d2ae",
    "fragmentation_stays": "ed58216084c24b6ba7f024adbdd8e4e6",
    "fragmentation_unverified": "fd0b1a48fa524ae58f4c14ae4b82f464",
    "compaction_not_asked": "5647cded525e4e8481aadcd377506e21",
    "history": "5428f6557d204b478ab76f11254b3ffe",
    "history_written": "5e6872cbe7604837a8b33277dd1ab37b",
    "failed": "6064e0b4a6b345e8b2b4511fca4a0b8f",
}
# Never held back, however often they come: who was stopped, who had to go, what an operator did.
DECISIONS: Final = frozenset(
    {"revoked", "complied", "stopped", "unkillable", "oom_kill", "evicting", "quota_set"}
    | {"drained", "resumed", "admission_closed", "admission_opened"}
)


def configure(chosen: Format) -> structlog.typing.FilteringBoundLogger:
    """Set structlog up for this process and return its logger.

    ``auto`` is the journal where systemd has connected stderr to it, a terminal's words where
    stderr is one, JSON lines otherwise.
    """
    if chosen == "auto":
        if check_journal_stream():
            chosen = "journal"
        else:
            chosen = "console" if sys.stderr.isatty() else "json"
    processors: list[Any] = [structlog.processors.add_log_level]
    if chosen == "journal":
        processors.append(_Journal())
    elif chosen == "console":
        processors += [
            structlog.processors.TimeStamper("%H:%M:%S", utc=False),
            _in_words,
        ]
    else:
        processors += [
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=processors,
        logger_factory=structlog.WriteLoggerFactory(_Behind()),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def _in_words(_logger: object, _method: str, fields: Fields) -> str:
    """One line for a terminal: ``21:03:11  stopped  greedy  limit=300.0 MiB ...``."""
    stamp, level = fields.pop("timestamp"), fields.pop("level")
    event, worker = str(fields.pop("event")), fields.pop("worker", "")
    mark = {"warning": "!", "error": "!!", "critical": "!!"}.get(level, " ")
    where = str(fields.pop("where", "")).splitlines()  # a traceback
    line = f"{stamp} umad {mark:2}{event.replace('_', ' ')} {worker}  {words(fields)}".rstrip()
    # What a program is called is its own choice; a line end in it would be another's line.
    return "\n".join(map(printable, (line, *where)))


class _Behind:
    """A file that writes to stderr in a thread of its own.

    A terminal that was stopped with Ctrl-S, or a pipe that nobody reads, must not stop the loop.
    What does not fit in the queue is lost.
    """

    LINES_MAX: Final = 1000
    FLUSH_WITHIN_S: Final = 1.0

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(self.LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    def write(self, text: str) -> None:
        """Queue a text."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(text)

    def flush(self) -> None:
        """Nothing to do: the thread writes as it can."""

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                os.write(2, text.encode())
            except OSError:
                return  # nobody is there to read

    def _finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(self.FLUSH_WITHIN_S)


class _Journal:
    """Sends events to journald with their fields, by its native protocol.

    A journald that takes nothing now, for memory is short, gets them before the next event, in
    their order: who was stopped must not be lost just then.
    """

    WAITING_MAX: Final = 1000

    def __init__(self) -> None:
        self._transport = JournaldTransport()
        self._transport.socket.setblocking(False)
        self._waiting: deque[list[tuple[str, object]]] = deque(maxlen=self.WAITING_MAX)

    def __call__(self, _logger: object, _method: str, fields: Fields) -> str:
        event, level = str(fields.pop("event")), str(fields.pop("level"))
        self._waiting.append(entry("umad", event, level, fields, MESSAGE_IDS.get(event)))
        with contextlib.suppress(OSError):
            while self._waiting:
                self._transport.send(self._waiting[0])
                self._waiting.popleft()
        raise structlog.DropEvent


def exit_with(code: int, message: str) -> int:
    """Say why the program ends, for a person and the journal alike; returns the code."""
    os.write(2, (message.rstrip() + "\n").encode())
    return code
