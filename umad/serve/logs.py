"""Logging of the two programs of this folder: structlog on stderr, the libraries' lines too.

One event per decision, keys with units, never a word of a request.
"""

import logging
import sys
from typing import Any, Final

import structlog
from structlog.typing import EventDict

FORMATS: Final = ("auto", "console", "json")


def configure(log_format: str, program: str) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        log_format: one of FORMATS; "auto" is console on a terminal and json elsewhere.
        program: named in every line.
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())

    def name_program(_logger: Any, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: a thread that is started later would not have it.
        return {"program": program, **event}

    shared: list[Any] = [
        name_program,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    handler = logging.StreamHandler(sys.stderr)
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
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


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
