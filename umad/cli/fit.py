"""A model's cost formula as people read it: what its forwards took, in words and as a picture.

Values in, text and figures out.  The formula is fitted here, from the same samples and by the same
code as where it is used (``core.cost``).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from umad.core.cost import SAMPLES_MIN, CostModel, Formula, Sample
from umad.units import MIB, format_bytes

PICTURES: Final = (".svg", ".png")
_QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.98, 1.0)
_TERMS: Final = (
    ("base", ""),
    ("per_token", " x tokens"),
    ("per_row", " x rows"),
    ("per_token_row", " x tokens x rows"),
    ("per_square_row", " x tokens^2 x rows"),
)


def fitted(answer: Mapping[str, Any]) -> CostModel:
    """The model's formula, from the daemon's answer to ``cost``."""
    return CostModel(Sample(*row) for row in answer["samples"])


def as_values(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for programs; residuals are measured less formula, in bytes."""
    cost = fitted(answer)
    formula = cost.formula
    return {
        "model": answer["model"],
        "shape": answer["shape"],
        "samples": [Sample(*row)._asdict() for row in answer["samples"]],
        "formula": None if formula is None else formula._asdict(),
        "widening": cost.widening,
        "exceeded": cost.exceeded,
        "residuals": {} if formula is None else _residuals(formula, cost.samples),
        "stops": answer["stops"],
    }


def as_text(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of ``umadctl fit``, top to bottom."""
    cost = fitted(answer)
    formula, count = cost.formula, len(cost.samples)
    yield Text(f"{answer['model']}: {count} forwards measured", style="bold")
    if answer["shape"]:
        yield Text(answer["shape"], style="dim")
    if not count and answer["models"] and answer["model"] not in answer["models"]:
        yield Text(f"nothing is known of it; known are: {', '.join(answer['models'])}")
    if formula is None:
        yield Text(
            f"no formula before {SAMPLES_MIN} of them: the worst case by its configuration counts"
        )
    else:
        yield Text(f"bytes = {in_words(formula)}")
        if cost.widening >= 1:
            yield Text(
                f"and up to {format_bytes(round(cost.widening))} more since a prediction was "
                "exceeded",
                style="yellow",
            )
        yield ""
        yield _data(formula, cost)
        yield ""
        missed = _residuals(formula, cost.samples)
        shown = _table("MISSED BY", *missed)
        shown.add_row("", *map(_signed, missed.values()))
        yield shown
    yield Text(f"\npredictions exceeded: {cost.exceeded} of {len(answer['samples'])}")
    for stop in answer["stops"]:
        when = datetime.fromtimestamp(stop["unix_s"]).astimezone().isoformat(" ", "seconds")
        yield Text(
            f"stopped {when}: {stop['reason']}, held {format_bytes(stop['measured_bytes'])} of "
            f"{format_bytes(stop['limit_bytes'])}",
            style="yellow",
        )


def in_words(formula: Formula) -> str:
    """The terms that count, and the margin."""
    values = formula._asdict()
    terms = [f"{_rate(values[name])}{unit}" for name, unit in _TERMS if values[name]]
    return " + ".join([*terms, f"margin {_rate(formula.margin)}"])


def draw(answer: Mapping[str, Any], file: Path) -> None:
    """Predicted against measured, with the margin, as a picture.

    Args:
        answer: the daemon's answer to ``cost``.
        file: ends in one of ``PICTURES``.

    Raises:
        click.ClickException: there is nothing to draw, nothing to draw with, or no place for it.
    """
    cost = fitted(answer)
    formula = cost.formula
    if formula is None:
        raise click.ClickException(f"there is no formula before {SAMPLES_MIN} measured forwards")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'umad[plots]'"
        ) from error
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    took = [sample.bytes / MIB for sample in cost.samples]
    said = [formula.expected(sample.tokens, sample.rows) / MIB for sample in cost.samples]
    end = max(*took, *said) * 1.05 or 1.0
    line = [end * at / 50 for at in range(51)]
    booked = [at + formula.margin / MIB for at in line]
    booked = [at + cost.on_top(at * MIB) / MIB for at in booked]
    axes.fill_between(line, line, booked, alpha=0.15, label="margin")
    axes.plot(line, line, linewidth=1, label="formula = measured")
    over = [sample.exceeded for sample in cost.samples]
    for exceeded, label, marker in (
        (False, "forward", "o"),
        (True, "exceeded its prediction", "X"),
    ):
        places = [at for at, one in enumerate(over) if one is exceeded]
        if places:
            axes.scatter(
                [said[at] for at in places],
                [took[at] for at in places],
                s=28,
                alpha=0.7,
                marker=marker,
                label=label,
            )
    axes.set(
        xlim=(0, end),
        ylim=(0, end),
        xlabel="formula (MiB)",
        ylabel="measured (MiB)",
        title=f"{answer['model']}: {len(took)} forwards beyond the weights",
    )
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from error


def _data(formula: Formula, cost: CostModel) -> RenderableType:
    """The forwards, those of like work in one line."""
    groups: dict[int, list[Sample]] = {}
    for sample in cost.samples:
        groups.setdefault(sample.work.bit_length(), []).append(sample)
    shown = _table("TOKENS", "ROWS", "FORWARDS", "MEASURED", "FORMULA", "BOOKED")
    for _, samples in sorted(groups.items()):
        most = max(samples, key=lambda sample: sample.bytes)
        expected = formula.expected(most.tokens, most.rows)
        booked = expected + formula.margin
        booked += cost.on_top(booked)
        shown.add_row(
            _span([sample.tokens for sample in samples]),
            _span([sample.rows for sample in samples]),
            str(len(samples)),
            format_bytes(most.bytes),
            format_bytes(round(expected)),
            format_bytes(round(booked)),
        )
    return shown


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", overflow="ellipsis")
    return table


def _residuals(formula: Formula, samples: Sequence[Sample]) -> dict[str, int]:
    """What the formula missed, at some quantiles."""
    missed = sorted(
        sample.bytes - formula.expected(sample.tokens, sample.rows) for sample in samples
    )
    last = len(missed) - 1
    return {f"{part:.0%}": round(missed[round(part * last)]) for part in _QUANTILES}


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"


def _rate(value: float) -> str:
    """Bytes, of which there may be a fraction."""
    return format_bytes(round(value)) if value >= 1024 else f"{value:.3g} B"
