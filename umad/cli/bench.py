"""``umadctl bench``: how fast a server answers under a load, in words, for programs, as a picture.

Owns the command and its report.  Rules: percentiles are of requests that were answered, each of
them a time that was measured (nearest rank); beside them stands how many were not answered, and
why; a figure that this program itself may have spoilt is said to be one.
"""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from umad.cli.load import KINDS, REQUESTS_MAX, Measured, Outcome, Plan, generate
from umad.cli.params import DURATION

PICTURES: Final = (".svg", ".png")
PERCENTILES: Final = (50, 95, 99)
LATE_S: Final = 0.02
BUSY_RATIO: Final = 0.8


class _Mix(click.ParamType[tuple[tuple[int, float], ...]]):
    name = "mix"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[tuple[int, float], ...]:
        """(length, weight) of each part."""
        parts = []
        for part in str(value).split(","):
            length, _, weight = part.partition(":")
            try:
                parts.append((int(length), float(weight or 1)))
            except ValueError:
                self.fail(f'{part!r} is no LENGTH:WEIGHT; write "8:80,100:20"', param, context)
            if not 1 <= parts[-1][0] <= 100_000 or not 0 < parts[-1][1] <= 1e6:
                self.fail("lengths are from 1 to 100000, weights above zero", param, context)
        return tuple(parts)


@click.command()
@click.argument("url")
@click.option("--kind", type=click.Choice([*KINDS]), default="chat", show_default=True)
@click.option("--model", help="[default: the server's first of that kind]")
@click.option(
    "--rate",
    type=click.FloatRange(0, 10_000, min_open=True),
    help="Requests a second, by chance as from many people (open loop).",
)
@click.option(
    "--clients",
    type=click.IntRange(1, 4096),
    help="Clients that ask one after the other (closed loop).  [default: 1]",
)
@click.option("--warm-up", type=DURATION, default="5s", show_default=True, help="Not measured.")
@click.option("--duration", type=DURATION, default="30s", show_default=True, help="Measured.")
@click.option("--timeout", type=DURATION, default="60s", show_default=True, help="Of one request.")
@click.option(
    "--within", type=DURATION, default="1s", show_default=True, help="What is soon enough."
)
@click.option(
    "--lengths",
    "mix",
    type=_Mix(),
    help='Words of an input, or seconds of sound, each with its weight: "8:80,100:20".',
)
@click.option("--max-tokens", type=click.IntRange(1, 1 << 20), default=16, show_default=True)
@click.option("--size", metavar="WxH", help="Of images.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is by chance.")
@click.option("--json", "as_json", is_flag=True, help="Print everything for programs.")
@click.option(
    "--plot",
    metavar="FILE.svg|FILE.png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw the times.",
)
@click.pass_context
def bench(
    context: click.Context,
    url: str,
    kind: str,
    model: str | None,
    rate: float | None,
    clients: int | None,
    *,
    warm_up: float,
    duration: float,
    timeout: float,
    within: float,
    mix: tuple[tuple[int, float], ...] | None,
    max_tokens: int,
    size: str | None,
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Send a load to an OpenAI-compatible server and tell how it was answered.

    URL is where the server listens, like http://127.0.0.1:8600.  With --rate requests come whether
    or not others were answered, and a time counts from when its request was due; with --clients
    each waits for its answer (and 0.1 s after an error). Exits with 1 when nothing was answered.
    """
    if rate is not None and clients is not None:
        raise click.UsageError("--rate is an open loop and --clients a closed one; choose one")
    if rate is not None and rate * (warm_up + duration) > REQUESTS_MAX:
        raise click.UsageError(f"that would be more than {REQUESTS_MAX} requests")
    if duration <= 0:
        raise click.BadParameter("must be above zero", param_hint="--duration")
    if plot is not None and plot.suffix not in PICTURES:
        raise click.BadParameter(f"{plot} must end in {' or '.join(PICTURES)}", param_hint="--plot")
    plan = Plan(
        url=url.rstrip("/").removesuffix("/v1"),
        kind=kind,
        model=model or "",
        mix=mix or ((KINDS[kind][2], 1.0),),
        rate=rate,
        clients=clients or 1,
        warm_up_s=warm_up,
        duration_s=duration,
        timeout_s=timeout,
        max_tokens=max_tokens,
        size=size,
        seed=seed,
    )
    plan, measured = asyncio.run(_measure(plan))
    report = judged(plan, measured, within)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 80)
        for part in as_text(report):
            console.print(part, highlight=False)
    if plot is not None:
        draw(report, measured.outcomes, plot)
    if not report["answered"]:
        context.exit(1)


async def _measure(plan: Plan) -> tuple[Plan, Measured]:
    """Find the model, where none is named, and run the plan."""
    try:
        import httpx
    except ImportError as error:
        raise click.ClickException("a load needs httpx: pip install 'umad[bench]'") from error
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=unbounded, timeout=None, trust_env=False) as client:  # noqa: S113  each request has a timeout of its own
        if not plan.model:
            try:
                answer = await client.get(f"{plan.url}/v1/models", timeout=plan.timeout_s)
                cards = answer.raise_for_status().json()["data"]
                fit = [one["id"] for one in cards if one.get("kind", "") == KINDS[plan.kind][1]]
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise click.ClickException(f"{plan.url} gives no models: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise click.ClickException(f"{plan.url} is no such server") from error
            if not fit:
                raise click.ClickException(
                    f"{plan.url} names no model of kind {KINDS[plan.kind][1]}; choose with --model"
                )
            plan = Plan(**{**asdict(plan), "model": fit[0]})
        return plan, await generate(client, plan)


def judged(plan: Plan, measured: Measured, within_s: float) -> dict[str, Any]:
    """All figures, for programs; times in seconds, rates a second."""
    outcomes = measured.outcomes
    good = [one for one in outcomes if not one.error]
    soon = sum(one.seconds <= within_s for one in good)
    # Whoever ended while it was measured, so that no long tail counts as speed.
    ended = [one for one in good if one.at_s + one.seconds <= plan.duration_s]
    groups = {"all": good}
    if len(plan.mix) > 1:
        for length, _ in plan.mix:
            groups[str(length)] = [one for one in good if one.length == length]
    late = percentiles([one.late_s for one in outcomes])
    return {
        "plan": asdict(plan),
        "within_s": within_s,
        "requests": len(outcomes),
        "answered": len(good),
        "answered_per_s": len(ended) / plan.duration_s,
        "goodput_per_s": soon / plan.duration_s,
        "goodput_ratio": soon / len(outcomes) if outcomes else 0.0,
        "tokens_per_s": sum(one.tokens for one in ended) / plan.duration_s,
        "errors": dict(Counter(one.error for one in outcomes if one.error).most_common()),
        "seconds": {name: percentiles([one.seconds for one in of]) for name, of in groups.items()},
        "first_s": {
            name: percentiles([one.first_s for one in of if one.first_s is not None])
            for name, of in groups.items()
        },
        "count": {name: len(of) for name, of in groups.items()},
        "generator": {"late_s": late, "cpu_ratio": measured.cpu_s / max(measured.wall_s, 1e-9)},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank; nothing of nothing."""
    ordered = sorted(values)
    return {
        f"p{part}": ordered[math.ceil(part / 100 * len(ordered)) - 1]
        for part in PERCENTILES
        if ordered
    }


def as_text(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    plan, errors = report["plan"], report["errors"]
    pace = f"{plan['rate']:g}/s by chance" if plan["rate"] else f"{plan['clients']} clients"
    yield Text(f"{plan['kind']} of {plan['model']}: {pace}, {plan['duration_s']:g} s", style="bold")
    yield Text(
        f"answered {report['answered']} of {report['requests']}, {report['answered_per_s']:.4g}/s"
        + (f", {report['tokens_per_s']:.4g} tokens/s" if report["tokens_per_s"] else "")
    )
    yield Text(
        f"within {report['within_s']:g} s: {report['goodput_per_s']:.4g}/s, "
        f"{report['goodput_ratio']:.1%} of all"
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("LENGTH")
    for name in ("ANSWERS", *(f"P{part}" for part in PERCENTILES)):
        table.add_column(name, justify="right")
    streams = any(report["first_s"].values())
    if streams:
        for part in PERCENTILES:
            table.add_column(f"FIRST P{part}", justify="right")
    for name, count in report["count"].items():
        shown = [report["seconds"][name], *([report["first_s"][name]] if streams else [])]
        times = (_time(of.get(f"p{part}")) for of in shown for part in PERCENTILES)
        table.add_row(name, str(count), *times)
    yield ""
    yield table
    if errors:
        yield Text("\nnot answered", style="red")
        for error, count in errors.items():
            yield Text(f"  {count:>6}  {error}")
    for warning in _doubts(report):
        yield Text(f"\n{warning}", style="yellow")


def draw(report: Mapping[str, Any], outcomes: Sequence[Outcome], file: Path) -> None:
    """The times, as they came and by rank, as a picture.

    Raises:
        click.ClickException: there is nothing to draw with, or no place for it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'umad[plots]'"
        ) from error
    figure = Figure(figsize=(8, 7), layout="constrained")
    over, rank = figure.subplots(2)
    plan = report["plan"]
    for length, _ in plan["mix"]:
        of = [one for one in outcomes if one.length == length and not one.error]
        taken = sorted(one.seconds for one in of)
        label = f"length {length}"
        over.scatter([one.at_s for one in of], [one.seconds for one in of], s=8, label=label)
        rank.plot(taken, [(at + 1) / len(taken) for at in range(len(taken))], label=label)
    failed = [one for one in outcomes if one.error]
    if failed:
        times = [one.seconds for one in failed]
        over.scatter([one.at_s for one in failed], times, s=14, marker="x", label="not answered")
    over.axhline(report["within_s"], linewidth=1, linestyle=":")
    rank.axvline(report["within_s"], linewidth=1, linestyle=":")
    over.set(xlabel="due (s)", ylabel="answered after (s)", ylim=(0, None))
    rank.set(xlabel="answered after (s)", ylabel="part of the answers", xlim=(0, None), ylim=(0, 1))
    figure.suptitle(f"{plan['kind']} of {plan['model']}: {report['answered_per_s']:.4g} answers/s")
    for axes in (over, rank):
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from error


def _doubts(report: Mapping[str, Any]) -> Iterator[str]:
    """What speaks against the figures."""
    late = report["generator"]["late_s"].get("p99", 0.0)
    busy = report["generator"]["cpu_ratio"]
    if report["plan"]["rate"] and late > LATE_S:
        yield f"1 % of the requests were sent {_time(late)} or more too late: this program lags"
    if busy > BUSY_RATIO:
        yield f"this program took {busy:.0%} of a core itself: the figures may be its own"
    if 0 < report["answered"] < 100:
        yield f"p99 of {report['answered']} answers is their slowest; measure for longer"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
