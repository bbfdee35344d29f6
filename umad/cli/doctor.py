"""``umadctl doctor``: the preflight's findings as people and programs read them.

Pure but for ``daemon_state``; every line fits 80 columns but for commands, which are to be copied.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

import click

from umad import __version__
from umad.client import UmadError, connect
from umad.host import preflight
from umad.host.preflight import Finding
from umad.units import format_duration

_MARKS: Final = {"hard": ("HARD", "red"), "advice": ("advice", "yellow"), "ok": ("ok", "green")}
_GROUPS: Final = {
    "vm": "Kernel",
    "kernel": "Kernel",
    "memory": "Memory",
    "gpu": "GPU",
    "serve": "umad-serve",
    "config": "Configuration",
}
_NAME_CELLS: Final = 24
_INDENT: Final = " " * 10


def daemon_state(socket: str | None) -> tuple[dict[str, Any] | None, str]:
    """What a daemon says of itself; None and why where none answers."""
    try:
        with connect(socket, name="umadctl", timeout_s=2.0) as client:
            return client.call("status"), ""
    except UmadError as error:
        return None, error.message


def as_values(
    findings: Sequence[Finding], state: Mapping[str, Any] | None, problem: str
) -> dict[str, Any]:
    """The whole report for programs."""
    daemon = None if state is None else {**state["daemon"], "pace": state["pace"]}
    return {
        "version": __version__,
        "hard": _count(findings, "hard"),
        "advice": _count(findings, "advice"),
        "findings": [asdict(finding) for finding in findings],
        "daemon": daemon,
        "daemon_problem": problem,
    }


def as_lines(
    findings: Sequence[Finding], state: Mapping[str, Any] | None, problem: str
) -> Iterator[str]:
    """The whole report for people."""
    for title, group in groupby(findings, lambda one: _GROUPS[one.name.partition(".")[0]]):
        yield click.style(title, bold=True)
        for finding in group:
            yield from _finding(finding)
        yield ""
    yield click.style("Daemon", bold=True)
    for text in _daemon(state, problem):
        yield from textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from _summary(findings)


def _finding(finding: Finding) -> Iterator[str]:
    mark, colour = _MARKS[finding.severity]
    text = finding.found + (f"; should be {finding.should}" if finding.should else "")
    first, *more = textwrap.wrap(text, 80 - len(_INDENT) - _NAME_CELLS, break_on_hyphens=False)
    yield f"  {click.style(f'{mark:7}', fg=colour)} {finding.name:{_NAME_CELLS - 1}} {first}"
    for line in more:
        yield f"{_INDENT}{'':{_NAME_CELLS}}{line}"
    if finding.severity != "ok":
        yield from preflight.remedy(finding, _INDENT)


def _daemon(state: Mapping[str, Any] | None, problem: str) -> Iterator[str]:
    if state is None:
        yield problem
        return
    daemon, pace = state["daemon"], state["pace"]
    yield f"umad {daemon['version']} runs (pid {daemon['pid']})"
    if daemon["permissive"]:
        forgiven = [text.partition(":")[0] for text in daemon["warnings"]]
        names = ", ".join(dict.fromkeys(forgiven)) or "nothing so far"
        yield f"permissive ({', '.join(daemon['permissive'])}): it started in spite of {names}"
    if daemon["conservative"]:
        yield "conservative mode: half of the memory may be booked"
    if pace is not None:
        yield f"looks at memory every {format_duration(pace['look_s'])}: {pace['reason']}"


def _summary(findings: Sequence[Finding]) -> Iterator[str]:
    hard, advice = _count(findings, "hard"), _count(findings, "advice")
    if hard:
        yield click.style(f"{hard} to mend before umad starts", fg="red") + f", {advice} advised."
        names = dict.fromkeys(
            one.name for one in findings if one.severity == "hard" and one.permissible
        )
        if names:
            option = f"umad --permissive={','.join(names)}"
            yield from textwrap.wrap(f"To start all the same: {option}", 80, break_on_hyphens=False)
    elif advice:
        yield f"umad can start; {advice} advised."
    else:
        yield click.style("Nothing to mend.", fg="green")


def _count(findings: Sequence[Finding], severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)
