"""One measured figure, beside its rival, as one JSON line."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """``value`` against ``target``; ``rival`` is what the same run measured beside it."""

    key: str
    figure: str
    value: float
    unit: str
    target: str
    rival: float | None
    runs: int
    min: float
    max: float
    ok: bool

    def line(self) -> str:
        return json.dumps(
            {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()},
            ensure_ascii=False,
        )


def ratio(
    key: str, figure: str, ours: Sequence[float], theirs: Sequence[float], limit: float
) -> Figure:
    """Medians of interleaved runs, ours over theirs; the extremes are those of run pairs.

    ``rival`` is the median of theirs, in the unit it was measured in.
    """
    pairs = [our / their for our, their in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    return Figure(
        key,
        figure,
        value,
        "ratio",
        f"<= {limit:.4g}",
        statistics.median(theirs),
        len(pairs),
        min(pairs),
        max(pairs),
        value <= limit,
    )


def at_most(
    key: str,
    figure: str,
    values: Sequence[float],
    unit: str,
    limit: float,
    *,
    share: float = 0.5,
    rival: float | None = None,
) -> Figure:
    """The quantile ``share`` of the values against a limit."""
    ordered = sorted(values)
    value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return Figure(
        key,
        figure,
        value,
        unit,
        f"<= {limit}",
        rival,
        len(ordered),
        ordered[0],
        ordered[-1],
        value <= limit,
    )
