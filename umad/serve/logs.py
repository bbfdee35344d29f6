"""Logging of the programs of this folder: structlog on stderr, the libraries' lines too.

One event per decision, keys with units, never a word of a request.  Where systemd has connected
stderr to the journal, each event goes there with its fields.  Owns the MESSAGE_IDs.
"""

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import structlog
from logging_journald import JournaldTransport, check_journal_stream
from structlog.typing import EventDict

from umad.journal import WINDOW_S, Repeats, entry

FORMATS: Final = ("auto", "console", "json", "journal")
# Stable for ever: people grep for them, the catalogue explains them.  Made once with uuid4.
MESSAGE_IDS: Final[Mapping[str, str]] = {
    "serve.listening": "cfad907992214d8db63d2554bd3eb262",
    "serve.ended": "1046c597f5764d8983e504f6ce134d62",
    "serve.reloaded": "0c20d35d00b142afaa9020927eadb8f1",
    "serve.not_reloaded": "294ae3ea9fd24287add77fe11f8c3f05",
    "serve.engine_not_told": "70ff21f4f6c64010bbf713ccacd48e77",
    "engine.start": "58c6dbb5b7354c20ada7e2d13999a33e",
    "engine.no_start": "d609dfb7309f41a6bec500fad296f48f",
    "engine.ended": "e97f3907509041f0b291b5578086aa76",
    "engine.environment": "c026b0bb38fd492e94c859c3edefbad1",
    "engine.libraries": "f80d0314b6e34a3bb495f50222717a07",
    "engine.recycled": "1339848652fb43fc86e20de17f267e80",
    "engine.not_recycled": "da00e38c6623414c8a103f50768bca86",
    "engine.reloaded": "5a1a763804aa48328904ab4d42c25dc6",
    "engine.poisoned": "a2c21752cdcd4f8f87f4a3cdb2347fd3",
    "books.waiting": "a17f4b55915f4491b4e6e428f41170d7",
    "link.broken": "6c67f25bad914b59ad47c86b21fe06e7",
    "model.ready": "a75693648ac44ca081e5f0b218f0835d",
    "model.waiting": "e5bcea715dab485989d95135682b45c1",
    "model.failed": "cc79b566eda3431eb39f2a99f3a352b8",
    "model.unloaded": "c2ef20147ac14d8abeddf6bf231b6328",
    "model.no_room": "750bd893a0db468382688b3d09abf036",
    "model.quota_refused": "ad8a7ea7258f41929191200532451a3a",
    "model.over_quota": "452fdee3a5d3452a89de64eb8a994f8a",
    "model.fallback": "59065ec08a4e4dc595c68433e8468d91",
    "model.recycled": "e6c62cfddaac4b44bc928e3d65eb758b",
    "model.stuck": "5bfafff8b7524faaa9bbfbe7e5d00e10",
    "model.error": "59f923604b4b4bb4b93d06e31c12db06",
    "model.offended": "8002ac6a99ce4d6fa96c60595c2aede3",
    "model.cost_unknown": "7dfe7c13c1e045bfb4d4b88410a197a6",
    "model.device_quota_off": "2924658eef9646fabd249c10a5322f25",
    "model.device_release_failed": "b8a18c6bb0c94ba9818896be17b5ab9b",
    "model.device_bytes_left": "08701676a14f4c3ab7be482aef4a3df4",
    "model.forked": "35b75ff5a4ad43d48dda4adacb1527f5",
    "child.failed": "a3ebd2b3b64148679b5495cf5e230648",
    "child.broken": "2074d48738394f7786cf51129566ab99",
    "child.link_broken": "5819a80a7a9c4b02aa4bd766eb786d88",
    "child.recycled": "a158f9b8b3004980b8f125670722ce47",
    "child.not_recycled": "454c66d2e443467183375a1b04d84af3",
    "zygote.start": "2f7d7910c5e841128adf621a4b183ef7",
    "zygote.refused": "03b9e24d9b4a44e08ceffa0adc519bdf",
    "zygote.forked": "c7a166ca9f8c4fe69c360f67a8f2d4e9",
    "zygote.reaped": "6c1301a377fc42edaf7e4a6852e5480d",
    "batch.split": "6ceb14e14a2e4eefabf25d3fc8365813",
    "answer.set_aside": "001f625143542a44b9b2af2c6fb23c61",
    "prompts.not_kept": "66a56b26adeb46b18811d634bef23b71",
    "turns.restarted": "1516918272234530a2ea281112533e2e",
    "request.bug": "589cf3bfb49f4ae3ad7719b77ce04d0b",
    "request.end": "4898d3a8fe304a7b95d6679ce8116574",
}
# Never held back: what was decided about a model or a process, and the one line of each request.
# The zygote's too, which forks and so may have no second thread to tell a count later.
DECISIONS: Final = frozenset(
    {
        "request.end",
        "model.forked",
        "zygote.start",
        "zygote.refused",
        "zygote.forked",
        "zygote.reaped",
    }
    | {"model.offended", "model.recycled", "model.stuck", "engine.start", "engine.ended"}
)


def configure(log_format: str, program: str) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        log_format: one of FORMATS; "auto" is the journal where stderr leads there, console on a
            terminal, json elsewhere.
        program: named in every line.
    """
    if log_format == "auto":
        to_journal, on_terminal = check_journal_stream(), sys.stderr.isatty()
        log_format = "journal" if to_journal else "console" if on_terminal else "json"

    def name_program(_logger: Any, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: a thread that is started later would not have it.
        return {"program": program, **event}

    shared: list[Any] = [
        name_program,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    render: Any = structlog.processors.JSONRenderer()
    if log_format == "console":
        render = structlog.dev.ConsoleRenderer()
    elif log_format == "journal":
        handler, render = _ByFormatter(), _Journal()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # A traceback names places, and its exceptions' texts could hold a request's
                # words: type and place are enough.
                structlog.processors.ExceptionRenderer(_places),
                render,
            ],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("uvicorn", "uvicorn.access", "asyncio", "httpx", "transformers", "diffusers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    structlog.configure(
        processors=[_Limit(), *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


class _Limit:
    """Has repeats counted (see ``Repeats``); a timer tells the count where nothing follows."""

    def __init__(self) -> None:
        self._repeats = Repeats(DECISIONS)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        atexit.register(self._end_windows, math.inf)

    def __call__(self, _logger: Any, method: str, event: EventDict) -> EventDict:
        if "repeated" in event or "exc_info" in event:  # a count on its way out; a bug of ours
            return event
        now_s = time.monotonic()
        self._end_windows(now_s)
        fields = {key: value for key, value in event.items() if key != "event"}
        with self._lock:
            is_told = self._repeats.offer(event["event"], method, fields, now_s)
            if not is_told and self._timer is None:
                self._wake_later()
        if not is_told:
            raise structlog.DropEvent
        return event

    def _end_windows(self, now_s: float) -> None:
        with self._lock:
            ended = list(self._repeats.due(now_s))
        log = structlog.get_logger()
        for told in ended:
            getattr(log, told.level)(told.event, **told.fields)

    def _wake_later(self) -> None:
        self._timer = threading.Timer(WINDOW_S, self._woken)
        self._timer.daemon = True
        self._timer.start()

    def _woken(self) -> None:
        self._end_windows(time.monotonic())
        with self._lock:
            self._timer = None
            if self._repeats.holding:
                self._wake_later()


class _ByFormatter(logging.Handler):
    """The formatter's last processor sends the entry: nothing is left to write."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


class _Journal:
    """Sends events to journald with their fields; what it does not take at once is lost."""

    def __init__(self) -> None:
        self._transport = JournaldTransport()
        self._transport.socket.setblocking(False)

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> str:
        told, program, level = (str(event.pop(key)) for key in ("event", "program", "level"))
        event.pop("timestamp")  # the journal has its own
        if told not in MESSAGE_IDS:  # a library's sentence
            event, told = {"text": told, **event}, "library"
        with contextlib.suppress(OSError, UnicodeEncodeError):
            self._transport.send(entry(program, told, level, event, MESSAGE_IDS.get(told)))
        return ""


def place_of(error: BaseException) -> str:
    """Where an exception was raised, as ``file.py:12``; empty when it was not raised."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{trace.tb_lineno}"


def _places(exc_info: Any) -> str:
    error = exc_info[1]
    return f"{type(error).__name__} at {place_of(error)}"
