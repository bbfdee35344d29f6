"""What models' forwards took and who was stopped, as far as it is kept for later.

Owns the bounded windows that a model's cost formula is fitted to, by whoever predicts and from the
samples alone (``core.cost``).  Rules: samples are of one *shape* of the model, and another shape
begins anew; the model whose last forward is longest ago goes first when there are too many.
The shell writes the same to the disk (host/history.py).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from umad.core.cost import Sample
from umad.core.histogram import Histogram
from umad.values import HISTORY_MODELS_MAX, HISTORY_SAMPLES_MAX, HISTORY_STOPS_MAX, ModelHistory

STOPS_ANSWERED_MAX: Final = 8
# Above 1 a prediction was too low, far below 1 memory lay idle.
RATIO_BOUNDS: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_STOP_FIELDS: Final = ("worker", "reason", "fence", "measured_bytes", "limit_bytes")


@dataclass(slots=True)
class Window:
    """One model's samples, oldest first.

    ``ratios`` are what forwards took as shares of what was predicted for them, since the start.
    """

    shape: str = ""
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES_MAX))
    ratios: Histogram = field(default_factory=lambda: Histogram(RATIO_BOUNDS))


class History:
    """Every model's window, and the last stops."""

    def __init__(
        self,
        models: Mapping[str, ModelHistory] | None = None,
        stops: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._models: dict[str, Window] = {}
        for name, kept in (models or {}).items():
            self._window(name).shape = kept.shape
            self._window(name).samples.extend(Sample(*row) for row in kept.rows)
        self._stops = deque(stops, HISTORY_STOPS_MAX)

    def observe(self, model: str, sample: Sample) -> None:
        """A forward of the model has ended."""
        window = self._window(model)
        window.samples.append(sample)
        if sample.predicted:
            window.ratios.observe(sample.bytes / sample.predicted)

    def ratios(self, model: str) -> Histogram | None:
        """How near a model's forwards came to what was predicted; None where none was."""
        window = self._models.get(model)
        return None if window is None else window.ratios

    def reshape(self, model: str, shape: str) -> None:
        """The model that is loaded now is of this shape."""
        window = self._window(model)
        if window.shape != shape:
            window.shape = shape
            window.samples.clear()

    def stopped(self, fields: Mapping[str, Any], unix_s: float) -> dict[str, Any]:
        """Somebody was stopped; what is kept of that event."""
        stop = {"unix_s": unix_s} | {name: fields.get(name) for name in _STOP_FIELDS}
        self._stops.append(stop)
        return stop

    def answer(self, model: str) -> dict[str, Any]:
        """All that is known of a model, as plain values, and which models are known."""
        window = self._models.get(model, Window())
        stops = [
            {name: value for name, value in stop.items() if name != "worker"}  # there may be many
            for stop in self._stops
            if model in _models_of(stop)
        ]
        return {
            "model": model,
            "shape": window.shape,
            "samples": [list(sample) for sample in window.samples],
            "stops": stops[-STOPS_ANSWERED_MAX:],
            "models": list(self._models),
        }

    def _window(self, model: str) -> Window:
        """A model's window, from now on the one used last."""
        window = self._models.pop(model, None) or Window()
        self._models[model] = window
        if len(self._models) > HISTORY_MODELS_MAX:
            del self._models[next(iter(self._models))]
        return window


def _models_of(stop: Mapping[str, Any]) -> set[str]:
    return {name.partition("/")[0] for name in str(stop["worker"]).split(",")}
