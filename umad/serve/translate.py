"""What a model's own code raises, as an error of umad; its frames let go of their tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from umad.client.memory import forget_frames, is_out_of_memory
from umad.errors import ModelFailed, QuotaExceeded, UmadError
from umad.serve.logs import place_of

_ALWAYS_TOLD: Final = ("load", "life")
log = structlog.get_logger()


class Poisoned(ModelFailed):
    """A device fault: every later call of this process would fail too (see R6 in the tests)."""


@contextmanager
def translated(worker: str, during: str) -> Iterator[None]:
    """Whatever model code raises, as an error of umad; its frames let go of their tensors.

    Raises:
        QuotaExceeded: torch or Python got no memory.
        ModelFailed: anything else.
    """
    try:
        yield
    except UmadError as error:
        forget_frames(error)
        raise
    except Exception as error:
        kind, place = type(error).__name__, place_of(error)
        # The text of an error in a job could quote the job; that of a load cannot.
        text = str(error)[:300] if during == "load" else ""
        told = _translate(error, kind, text)
        # Among jobs, one that was refused memory may only have to wait, or to be done alone:
        # whoever decides that says what came of it.
        if during in _ALWAYS_TOLD or not isinstance(told, QuotaExceeded):
            log.error("model.error", model=worker, during=during, kind=kind, place=place, text=text)
        forget_frames(error)
        raise told from error


def _translate(error: Exception, kind: str, text: str) -> UmadError:
    if is_out_of_memory(error):
        return QuotaExceeded("the model needed more memory than it was given", retry_after_s=5)
    if kind == "AcceleratorError":  # torch's, for a device that failed under it
        return Poisoned("the device failed; the inference process starts again")
    return ModelFailed(f"the model failed with {kind}{': ' if text else ''}{text}")
