"""A stacked area over time as one SVG: who held how much, limits as lines, what happened below.

Values in, text out; every text is escaped.  Colours are CSS variables of the page (``STYLE``), so
that the same picture is light and dark; nothing is told by colour alone.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from itertools import pairwise
from typing import Final

from umad.units import MIB, format_bytes

LAYERS_MAX: Final = 9  # more cannot be told apart
STYLE: Final = """
:root { --paper:#fff; --ink:#1b1f24; --faint:#5b6470; --rule:#d5dae0; --alarm:#b3261e;
  --l0:#0072b2; --l1:#e69f00; --l2:#009e73; --l3:#cc79a7; --l4:#56b4e9; --l5:#d55e00;
  --l6:#8a7fd0; --l7:#b5a642; --l8:#8c8c8c; }
@media (prefers-color-scheme: dark) { :root { --paper:#15181c; --ink:#e8eaed; --faint:#a3abb5;
  --rule:#353b43; --alarm:#ff8a80; } }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .label { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; font-weight: 600; }
svg .rule { stroke: var(--rule); }
svg .layer { stroke: var(--paper); stroke-width: .6px; }
svg .line { fill: none; stroke: var(--ink); stroke-width: 1.6px; }
svg .limit { stroke-dasharray: 7 4; stroke: var(--alarm); }
svg .mark { stroke: var(--ink); stroke-width: 2px; fill: none; }
svg .alarm { stroke: var(--alarm); }
"""

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _GAP, _LANE = 908, 84, 24, 16, 300, 10, 24
_SEAM_S: Final = 0.001  # halves of a time do not add up to the last digit
_STEPS_S: Final = (10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of the stack: bytes at each time."""

    name: str
    values: Sequence[int]


@dataclass(frozen=True, slots=True)
class Line:
    """A figure to compare with; None where it is not known.  A limit is dashed."""

    name: str
    values: Sequence[int | None]
    limit: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, shown in a lane of its own kind."""

    unix_s: float
    words: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """Marks of one kind: ``shape`` is "bar" (as high as it happened often), "go" or "stop"."""

    name: str
    shape: str
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a time and a size are in the picture."""

    begin_s: float
    end_s: float
    top_bytes: int

    def x(self, unix_s: float) -> float:
        part = (unix_s - self.begin_s) / (self.end_s - self.begin_s)
        return round(_LEFT + min(1.0, max(0.0, part)) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, size: int) -> float:
        return round(_TOP + _HEIGHT * (1 - size / self.top_bytes), 1)


def draw(
    name: str,
    title: str,
    description: str,
    times: Sequence[float],
    layers: Sequence[Layer],
    lines: Sequence[Line],
    lanes: Sequence[Lane],
    span: tuple[float, float],
) -> str:
    """The picture.

    Args:
        name: of the picture in its page, for the ids.
        title: what it is.
        description: what can be seen in it, for who does not see it.
        times: seconds since 1970, rising, one for each value.
        layers: from the bottom up.
        lines: drawn over them.
        lanes: below, top to bottom.
        span: from when to when.
    """
    most = [sum(column) for column in zip(*(layer.values for layer in layers), strict=True)]
    most += [value for line in lines for value in line.values if value is not None]
    frame = _Frame(*span, max(round(max(most, default=0) * 1.06), MIB))
    bottom = _TOP + _HEIGHT + _GAP + _LANE * len(lanes)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 26}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(title)}</title>',
        f'<desc id="{name}-desc">{escape(description)}</desc>',
        *_axes(frame, bottom),
        *_stack(frame, _columns(times), layers),
        *(_line(frame, _columns(times), line) for line in lines),
        *(part for at, lane in enumerate(lanes) for part in _lane(frame, at, lane)),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(frame: _Frame, bottom: float) -> Iterator[str]:
    step = 1 << max(0, math.ceil(math.log2(frame.top_bytes / 6)))
    for size in range(0, frame.top_bytes, step):
        y = frame.y(size)
        yield f'<path class="rule" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        shown = format_bytes(size).replace(".0 ", " ")
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{shown}</text>'
    long_s = frame.end_s - frame.begin_s
    step_s = next((one for one in _STEPS_S if long_s / one <= 8), 86400)
    clock = "%H:%M:%S" if step_s < 60 else "%H:%M"
    # Local time may be half an hour off the hour of UTC.
    shift_s = (datetime.fromtimestamp(frame.begin_s).astimezone().utcoffset() or _NO).seconds
    first_s = math.ceil((frame.begin_s + shift_s) / step_s) * step_s - shift_s
    for unix_s in range(first_s, math.floor(frame.end_s) + 1, step_s):
        x = frame.x(unix_s)
        yield f'<path class="rule" d="M{x} {_TOP}V{bottom}"/>'
        shown = datetime.fromtimestamp(unix_s).strftime(clock)
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{shown}</text>'


_NO: Final = datetime.min - datetime.min


def _columns(times: Sequence[float]) -> list[tuple[float, float]]:
    """From when to when each value counts: to halfway to the next, over no gap."""
    if not times:
        return []
    steps = sorted(after - before for before, after in pairwise(times))
    reach_s = max(10.0, 2.5 * steps[len(steps) // 2] if steps else 0.0) / 2
    edges = [
        (after - before) / 2 if after - before <= 2 * reach_s else 5.0
        for before, after in pairwise(times)
    ]
    return [
        (at - before, at + after)
        for at, before, after in zip(times, [5.0, *edges], [*edges, 5.0], strict=True)
    ]


def _stack(
    frame: _Frame, columns: Sequence[tuple[float, float]], layers: Sequence[Layer]
) -> Iterator[str]:
    below = [0] * len(columns)
    labels: list[str] = []
    for at, layer in enumerate(layers):
        above = [low + size for low, size in zip(below, layer.values, strict=True)]
        shape = "".join(_outline(frame, piece) for piece in _pieces(columns, below, above))
        if shape:
            yield (
                f'<path class="layer" style="fill:var(--l{at})" d="{shape}">'
                f"<title>{escape(layer.name)}</title></path>"
            )
            labels += _label(frame, columns, below, above, layer.name)
        below = above
    yield from labels


def _pieces(
    columns: Sequence[tuple[float, float]], below: Sequence[int], above: Sequence[int]
) -> Iterator[list[tuple[float, float, int, int]]]:
    """The columns that hang together; none where nothing is."""
    piece: list[tuple[float, float, int, int]] = []
    for (left, right), low, high in zip(columns, below, above, strict=True):
        if piece and (high <= low or left - piece[-1][1] > _SEAM_S):
            yield piece
            piece = []
        if high > low:
            piece.append((left, right, low, high))
    if piece:
        yield piece


def _outline(frame: _Frame, piece: Sequence[tuple[float, float, int, int]]) -> str:
    """Along the top and back along the bottom."""
    over = "".join(f"V{frame.y(high)}H{frame.x(right)}" for _, right, _, high in piece)
    under = "".join(f"V{frame.y(low)}H{frame.x(left)}" for left, _, low, _ in reversed(piece))
    return f"M{frame.x(piece[0][0])} {frame.y(piece[0][2])}{over}{under}z"


def _label(
    frame: _Frame,
    columns: Sequence[tuple[float, float]],
    below: Sequence[int],
    above: Sequence[int],
    name: str,
) -> Iterable[str]:
    """The name where the band is thickest, if it is thick enough; in the middle of a long one."""
    most = max(high - low for low, high in zip(below, above, strict=True))
    thickest = [at for at, low in enumerate(below) if above[at] - low >= 0.95 * most]
    at = thickest[len(thickest) // 2]
    thick = frame.y(below[at]) - frame.y(above[at])
    if thick < 16:
        return
    half = 4 * len(name)
    middle = frame.x(sum(columns[at]) / 2)
    x = min(max(middle, _LEFT + half), _WIDTH - _RIGHT - half)
    y = (frame.y(below[at]) + frame.y(above[at])) / 2 + 5
    yield (
        f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(name)}</text>'
    )


def _line(frame: _Frame, columns: Sequence[tuple[float, float]], line: Line) -> str:
    path, before_s = "", math.nan
    for (left, right), value in zip(columns, line.values, strict=True):
        if value is None:
            before_s = math.nan
            continue
        goes_on = left - before_s <= _SEAM_S  # never after a gap: nan
        joined = f"V{frame.y(value)}" if goes_on else f"M{frame.x(left)} {frame.y(value)}"
        path += f"{joined}H{frame.x(right)}"
        before_s = right
    kind = "line limit" if line.limit else "line"
    drawn = f'<path class="{kind}" d="{path}"><title>{escape(line.name)}</title></path>'
    if (last := line.values[-1]) is None:
        return drawn
    short = f"{line.name.partition(':')[0]} {format_bytes(last)}"
    at = f'x="{_WIDTH - _RIGHT - 4}" y="{frame.y(last) + (-6 if line.limit else 16)}"'
    return f'{drawn}<text class="label" {at} text-anchor="end">{escape(short)}</text>'


def _lane(frame: _Frame, at: int, lane: Lane) -> Iterator[str]:
    base = _TOP + _HEIGHT + _GAP + _LANE * (at + 1) - 4
    yield f'<text x="{_LEFT - 8}" y="{base - 3}" text-anchor="end">{escape(lane.name)}</text>'
    yield f'<path class="rule" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>'
    most = max((mark.count for mark in lane.marks), default=1)
    for mark in lane.marks:
        x = frame.x(mark.unix_s)
        high = 3 + 13 * math.log1p(mark.count) / math.log1p(most)
        kind, path = {
            "bar": ("mark", f"M{x} {base}v-{high:.1f}"),
            "go": ("mark", f"M{x - 5} {base - 13}h10l-5 9z"),
        }.get(lane.shape, ("mark alarm", f"M{x - 5} {base - 14}l10 10m0-10l-10 10"))
        yield f'<path class="{kind}" d="{path}"><title>{escape(mark.words)}</title></path>'


def legend(layers: Sequence[Layer], lines: Sequence[Line], notes: Mapping[str, str]) -> str:
    """What the bands and lines are, as a list."""
    items = [
        f'<li><svg class="swatch" viewBox="0 0 14 14" aria-hidden="true">'
        f'<rect width="14" height="14" style="fill:var(--l{at})"/></svg> {escape(layer.name)}'
        f"{escape(notes.get(layer.name, ''))}</li>"
        for at, layer in enumerate(layers)
    ]
    items += [
        f'<li><svg class="swatch" viewBox="0 0 14 14" aria-hidden="true">'
        f'<path class="line{" limit" if line.limit else ""}" d="M0 7H14"/></svg> '
        f"{escape(line.name)}</li>"
        for line in lines
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
