"""``umadctl report``: the last hour as one HTML file that a person reads, without umad.

Asks the daemon for its state, its timeline and its events.  The file needs nothing else: no
script, no style and no picture from anywhere.  Whatever a program calls itself is escaped.
"""

import platform
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

import click

from umad.cli import chart
from umad.cli.chart import Lane, Layer, Line, Mark
from umad.cli.events import fetch
from umad.cli.params import DURATION
from umad.cli.timeline import Held, Moment, Room, timeline
from umad.client import Client, connect
from umad.events import in_words
from umad.units import format_bytes, format_duration, printable

COLUMNS_MAX: Final = 400  # of a picture, which is 800 wide
ROWS_MAX: Final = 60  # of the figures as a table
_REST: Final = "all others"
_SAMPLED: Final = "Each 10 s stand for the moment in them when most was held."

_STYLE: Final = """
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } .wide > svg { min-width: 720px; width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; } caption { text-align: left;
  color: var(--faint); } th, td { padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid var(--rule); }
.n { text-align: right; white-space: nowrap; } time { white-space: nowrap; }
.warning, .error { color: var(--alarm); } .faint { color: var(--faint); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.swatch { width: 14px; height: 14px; vertical-align: -2px; }
"""


@dataclass(frozen=True, slots=True)
class Told:
    """All that the page is made of; ``parents`` says which pool another is carved from."""

    now_s: float
    since_s: float
    state: Mapping[str, Any]
    moments: Sequence[Moment]
    events: Sequence[Mapping[str, Any]]
    events_lost: bool

    @property
    def begin_s(self) -> float:
        """From when on there is something to show."""
        return min(max(self.since_s, self.first_s), self.now_s - 10)

    @property
    def first_s(self) -> float:
        """The first sample."""
        return self.moments[0].unix_s if self.moments else self.now_s


@click.command()
@click.option("--since", "since_s", type=DURATION, default="1h", show_default=True, metavar="TIME")
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    help='An existing one is replaced; "-" prints.  [default: umad-report-HOST-DATE.html]',
)
@click.pass_obj
def report(socket: str | None, since_s: float, target: Path | None) -> None:
    """Write what happened into one HTML file: memory over time, and every decision.

    umad keeps a sample each 10 s, for 24 h at most and since its start. The file needs no network
    and no script, and holds names of programs, models and pools; nothing of what models were asked.
    """
    with connect(socket, name="umadctl") as client:
        text = page(gather(client, time.time(), since_s))
    host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:40].strip("-") or "host"
    path = target or Path(f"umad-report-{host}-{time.strftime('%Y%m%d-%H%M%S')}.html")
    try:
        with click.open_file(str(path), "w", encoding="utf-8", atomic=str(path) != "-") as file:
            file.write(text)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
    if str(path) != "-":
        click.echo(f"{path}: {len(text) / 1024:.0f} KiB; open it in a browser")


def gather(client: Client, now_s: float, for_s: float) -> Told:
    """Ask the daemon.

    Args:
        client: connected to it.
        now_s: seconds since 1970.
        for_s: how long back.
    """
    since_s = now_s - for_s
    events = fetch(client, client.current_link())
    return Told(
        now_s,
        since_s,
        client.call("status"),
        list(timeline(client, since_s)),
        [event for event in events if event["unix_s"] >= since_s],
        bool(events) and events[0]["seq"] > 1 and events[0]["unix_s"] > since_s,
    )


def page(told: Told) -> str:
    """The whole file."""
    host = escape(printable(platform.node()))
    span = f"{_clock(told.begin_s, told)} to {_clock(told.now_s, told)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>umad: memory of {host}, {span}</title>",
        f"<style>{chart.STYLE}{_STYLE}</style></head><body><main>",
        f"<h1>Memory of {host}, {span}</h1>",
        *_summary(told),
        *(section for pool in _roots(told) for section in _pool(told, pool)),
        *_workers(told),
        *_decisions(told),
        *_machine(told),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _summary(told: Told) -> Iterator[str]:
    names = [event["name"] for event in told.events]
    granted = sum(moment.granted for moment in told.moments)
    refused = sum(moment.refused for moment in told.moments)
    yield (
        f"<p>{_times(granted, 'lease')} granted, {_times(refused, 'request')} refused, "
        f"{_times(names.count('evicting'), 'model')} asked to go, "
        f"<strong>{_times(names.count('stopped'), 'worker')} stopped</strong>.</p>"
    )
    if told.first_s > told.since_s + 60:
        yield (
            f'<p class="faint">Figures are kept since {_clock(told.first_s, told)}: umad started '
            "then, or it had too many workers to keep more.</p>"
        )


def _roots(told: Told) -> list[str]:
    """The pools with memory of their own that somebody booked in, the system's first."""
    used = {one.pool for moment in told.moments for one in moment.workers.values()}
    names = [pool["name"] for pool in told.state["pools"] if pool["parent"] is None]
    booked = {_root(told, pool) for pool in used}
    return [name for at, name in enumerate(names) if name in booked or at == 0] or ["system"]


def _root(told: Told, pool: str) -> str:
    parents = {one["name"]: one["parent"] for one in told.state["pools"]}
    while parents.get(pool):
        pool = parents[pool]
    return pool


def _pool(told: Told, pool: str) -> Iterator[str]:
    """One pool's picture, with what happened below it."""
    moments = _thinned(told)
    mine = [
        {name: one for name, one in moment.workers.items() if _root(told, one.pool) == pool}
        for moment in moments
    ]
    layers = _layers(mine)
    guessed = {
        name for column in mine for name, one in column.items() if one.holds is None and one.booked
    }
    rooms = [moment.pools.get(pool, Room(None, None, None, None)) for moment in moments]
    lines = [
        Line("budget: what all together may book", [room.budget for room in rooms], limit=True),
        Line("booked by all", [room.booked for room in rooms]),
    ]
    name = escape(pool)
    yield f'<h2 id="pool-{name}">Who held the memory of pool {name}</h2>'
    if not moments:
        yield "<p>Nothing has been seen yet; ask again in a few seconds.</p>"
        return
    description = _described(moments, layers, rooms, told)
    picture = chart.draw(
        f"pool-{name}",
        f"Memory of pool {pool} by worker",
        description,
        [moment.unix_s for moment in moments],
        layers,
        lines,
        _lanes(told, moments),
        (told.begin_s, told.now_s),
    )
    yield f"<p>{escape(description)} {_SAMPLED}</p>"
    yield f'<div class="wide" role="region" tabindex="0" aria-label="Picture">{picture}</div>'
    notes = dict.fromkeys(guessed, " (partly as booked: what it held is not known)")
    yield chart.legend(layers, lines, notes)
    yield "<details><summary>The figures of the picture</summary>"
    yield from _figures(told, moments, layers, rooms)
    yield "</details>"


def _thinned(told: Told) -> list[Moment]:
    """As many moments as a picture can show: of each stretch the one when most was held."""
    step_s = max(1.0, (told.now_s - told.begin_s) / COLUMNS_MAX)
    fullest: dict[int, Moment] = {}
    for moment in told.moments:
        at = int((moment.unix_s - told.begin_s) / step_s)
        if at not in fullest or moment.held > fullest[at].held:
            fullest[at] = moment
    return list(fullest.values())


def _layers(columns: Sequence[Mapping[str, Held]]) -> list[Layer]:
    """A band for each worker, those that held most at the bottom; the smallest share one."""
    sums: dict[str, int] = {}
    for column in columns:
        for name, one in column.items():
            sums[name] = sums.get(name, 0) + one.shown
    names = sorted(sums, key=lambda name: (-sums[name], name))
    most = chart.LAYERS_MAX - 1 if len(names) > chart.LAYERS_MAX else chart.LAYERS_MAX
    layers = [
        Layer(name, [column[name].shown if name in column else 0 for column in columns])
        for name in names[:most]
    ]
    if rest := names[most:]:
        sizes = [sum(column[name].shown for name in rest if name in column) for column in columns]
        layers.append(Layer(f"{_REST} ({len(rest)})", sizes))
    return layers


def _described(
    moments: Sequence[Moment], layers: Sequence[Layer], rooms: Sequence[Room], told: Told
) -> str:
    at = max(range(len(moments)), key=lambda one: sum(layer.values[one] for layer in layers))
    most = sum(layer.values[at] for layer in layers)
    budget = "an unknown budget" if (size := rooms[at].budget) is None else _size(size)
    who = ", ".join(f"{layer.name} {_size(max(layer.values))}" for layer in layers)
    return (
        f"The workers together held {_size(most)} at most, of a budget of {budget}, "
        f"at {_clock(moments[at].unix_s, told)}. The most that each held: {who or 'nobody any'}."
    )


def _lanes(told: Told, moments: Sequence[Moment]) -> list[Lane]:
    def counted(of: Mapping[float, int], what: str) -> list[Mark]:
        return [Mark(at, f"{_times(n, what)}", n) for at, n in of.items() if n]

    def marks(*names: str) -> list[Mark]:
        return [
            Mark(one["unix_s"], in_words(one)[1]) for one in told.events if one["name"] in names
        ]

    def summed(figure: str) -> dict[float, int]:
        """By the moments of the picture; what was between two counts for the later."""
        at = [moment.unix_s for moment in moments]
        sums = dict.fromkeys(at, 0)
        for moment in told.moments:
            sums[at[min(bisect_left(at, moment.unix_s), len(at) - 1)]] += getattr(moment, figure)
        return sums

    return [
        Lane("granted", "bar", counted(summed("granted"), "lease")),
        Lane("refused", "bar", counted(summed("refused"), "request")),
        Lane("asked to go", "go", marks("evicting")),
        Lane("stopped", "stop", marks("stopped", "unkillable", "oom_kill")),
    ]


def _figures(
    told: Told, moments: Sequence[Moment], layers: Sequence[Layer], rooms: Sequence[Room]
) -> Iterator[str]:
    step = -(-len(moments) // ROWS_MAX)
    heads = ["Time", *(layer.name for layer in layers), "Booked", "Budget", "Free", "Used by all"]
    rows = [
        [
            _clock(moment.unix_s, told),
            *(_size(layer.values[at]) for layer in layers),
            *map(_size, (rooms[at].booked, rooms[at].budget, rooms[at].free, rooms[at].used)),
        ]
        for at, moment in enumerate(moments)
        if at % step == 0
    ]
    yield from _table("What each held, over time", heads, rows, figures_from=1)


def _workers(told: Told) -> Iterator[str]:
    now = {worker["name"]: worker for worker in told.state["workers"]}
    rows = []
    seen = {name: None for moment in told.moments for name in moment.workers}
    for name in seen:
        its = [(one, moment) for moment in told.moments if (one := moment.workers.get(name))]
        most, when = max(its, key=lambda pair: pair[0].shown)
        state = now[name]["state"] if name in now else "gone"
        rows.append(
            [
                name,
                state,
                most.pool,
                _size(its[-1][0].quota),
                _size(its[-1][0].booked if name in now else 0),
                ("" if most.holds is not None else "booked ") + _size(most.shown),
                _clock(when.unix_s, told),
            ]
        )
    yield "<h2>Workers</h2>"
    heads = ["Worker", "Now", "Pool", "Quota", "Booked now", "Most held", "At"]
    yield from _table("Everyone who was seen", heads, rows, figures_from=3)


def _decisions(told: Told) -> Iterator[str]:
    yield "<h2>Decisions</h2>"
    if told.events_lost:
        yield (
            '<p class="faint">umad keeps its last 256 decisions; those before are in the journal: '
            "<code>journalctl -u umad</code></p>"
        )
    yield '<div class="wide" role="region" tabindex="0" aria-label="Decisions"><table>'
    yield "<caption>Oldest first; times are local</caption>"
    yield (
        '<thead><tr><th scope="col">Time</th><th scope="col">Level</th>'
        '<th scope="col">What happened</th></tr></thead><tbody>'
    )
    for event in told.events:
        level = escape(printable(str(event.get("level", ""))))
        yield (
            f'<tr class="{level}"><td>{_clock(event["unix_s"], told)}</td><td>{level}</td>'
            f"<td>{escape(in_words(event)[1])}</td></tr>"
        )
    yield "</tbody></table></div>"


def _machine(told: Told) -> Iterator[str]:
    state, daemon = told.state, told.state["daemon"]
    facts = {
        "Machine": f"{platform.node()}, {platform.system()} {platform.release()} "
        f"{platform.machine()}",
        "Daemon": f"umad {daemon['version']}, pid {daemon['pid']}, up "
        f"{format_duration(daemon['uptime_s'])}, start no. {state['generation']}",
        "Written": datetime.fromtimestamp(told.now_s).astimezone().isoformat(" ", "seconds"),
    }
    for pool in state["pools"]:
        facts[f"Pool {pool['name']} now"] = (
            f"{_size(pool['used'])} of {_size(pool['capacity'])} used; reserve "
            f"{_size(pool['reserve'])}, budget {_size(pool['budget'])}, booked "
            f"{_size(pool['booked'])}, free {_size(pool['free'])} (bound by "
            f"{pool['problem'] or pool['binding']})"
        )
    if daemon["warnings"]:
        facts["Not set up"] = "; ".join(daemon["warnings"])
    yield "<h2>Machine and daemon</h2><dl>"
    for name, value in facts.items():
        yield f"<dt>{escape(printable(name))}</dt><dd>{escape(printable(value))}</dd>"
    yield "</dl>"


def _table(
    caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]], *, figures_from: int
) -> Iterator[str]:
    """A table whose columns from ``figures_from`` on are figures; the first names its row."""

    def kind(at: int) -> str:
        return ' class="n"' if at >= figures_from else ""

    yield f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
    yield f"<caption>{escape(caption)}</caption><thead><tr>"
    for at, head in enumerate(heads):
        yield f'<th scope="col"{kind(at)}>{escape(printable(head))}</th>'
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = [f"<td{kind(at)}>{escape(printable(cell))}</td>" for at, cell in enumerate(row)]
        first = f'<th scope="row">{escape(printable(row[0]))}</th>'
        yield f"<tr>{''.join([first, *cells[1:]])}</tr>"
    yield "</tbody></table></div>"


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _clock(unix_s: float, told: Told) -> str:
    """Local time; with the day where the page is of more than one."""
    at, now = datetime.fromtimestamp(unix_s), datetime.fromtimestamp(told.now_s)
    first = datetime.fromtimestamp(told.begin_s)
    return at.strftime("%H:%M:%S" if first.date() == now.date() else "%b %d %H:%M:%S")
