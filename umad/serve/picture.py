"""What the status page shows: plain values in, HTML out; nothing is asked here.

Rules: what is not known is "?", never 0, and has no bar; every value is escaped by the template
(``static/status.html``); no figure is told by colour or length alone.  The template is the only
rendering: the page's script asks for the page again and takes over what has changed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from umad import __version__
from umad.events import in_words
from umad.serve.link import TAKES_REQUESTS
from umad.units import format_bytes, format_duration, printable

NEWS_MAX: Final = 20
STALE_S: Final = 2.0
_DAY_S: Final = 86400
_STATES: Final = {  # of a model: (words, tone)
    "ready": ("ready", "good"),
    "draining": ("draining", "warn"),
    "waking": ("loading", "warn"),
    "loading": ("loading", "warn"),
    "cold": ("cold", ""),
    "waiting": ("waiting", "warn"),
    "failed": ("stopped", "bad"),
}
_LOADED: Final = frozenset({"ready", "draining"})
_WORKER_TONES: Final = {
    "ready": "good",
    "loading": "warn",
    "waiting": "warn",
    "draining": "warn",
    "leaking": "warn",
    "cut off": "bad",
    "fenced": "bad",
    "orphaned": "bad",
}
_VERDICTS: Final = {"ok": "", "orphaned": "its first process has ended"}
_BINDING: Final = {
    "MemAvailable": "what the kernel says is available",
    "budget": "what is left of the budget",
    "psi": "tasks stall on memory, so twice the reserve is kept",
    "pressure": "memory was short, so nothing is granted until there is more",
}
_WAITS: Final = {"reserve": "memory to load", "admit": "memory for a request"}
_INIT: Final = "its turn to load"


@dataclass(frozen=True, slots=True)
class Heard:
    """What the daemon said: its ``status`` and ``events``, or why not and since when."""

    state: Mapping[str, Any] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    since_unix_s: float | None = None


class _Unknown(ChainableUndefined):
    """What an older daemon does not tell is not known."""

    def __str__(self) -> str:
        return "?"


def _size(value: object) -> str:
    return format_bytes(value) if isinstance(value, int) else "?"


def _seconds(value: object) -> str:
    return format_duration(value) if isinstance(value, int | float) else "?"


def _clock(unix_s: float) -> str:
    """As the machine's own log writes it; with the date where it is not of today."""
    recent = time.time() - unix_s < _DAY_S
    return time.strftime("%H:%M:%S" if recent else "%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _iso(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _share(value: object, whole: object) -> str:
    """A bar's length in percent; "" for none, where one of the two is not known."""
    if not isinstance(value, int) or not isinstance(whole, int) or whole <= 0:
        return ""
    return f"{min(100.0, max(0.0, 100 * value / whole)):.2f}%"


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("static")),
    autoescape=True,
    undefined=_Unknown,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "size": _size,
    "seconds": _seconds,
    "clock": _clock,
    "iso": _iso,
    "share": _share,
    "printable": printable,
}


def draw(look: Mapping[str, Any], heard: Heard, unix_s: float) -> str:
    """The page.

    Args:
        look: the front's state as ``/status`` shows it.
        heard: of the daemon.
        unix_s: now.
    """
    state = heard.state
    models = [_model(name, model) for name, model in look["models"].items()]
    return _TEMPLATES.get_template("status.html").render(
        version=__version__,
        now=unix_s,
        verdict=_verdict(look, heard),
        notes=[*_notes(look, heard)],
        state=state,
        pools=[] if state is None else [_pool(pool) for pool in state["pools"]],
        models=models,
        requests=look["requests"],
        groups=[] if state is None else _groups(state),
        scale=None if state is None else _scale(state["workers"]),
        unshown=0 if state is None else state["workers_total"] - len(state["workers"]),
        queue=[] if state is None else [_waiter(waiter) for waiter in state["queue"]],
        news=[(event, *in_words(event)) for event in reversed(heard.events[-NEWS_MAX:])],
    )


def _verdict(look: Mapping[str, Any], heard: Heard) -> tuple[str, str]:
    """(tone, one sentence) that says how things stand."""
    models = look["models"]
    ready = sum(model["ready"] for model in models.values())
    if heard.state is None:
        return "bad", "The memory daemon does not answer"
    if not look["engine"]["running"]:
        return "bad", "The inference process is being started"
    if not models:
        return "", "No models are configured"
    tone = "good" if ready == len(models) else "warn"
    if ready == len(models) == 1:
        return tone, "The model takes requests"
    which = "All" if ready == len(models) else f"{ready} of"
    return tone, f"{which} {len(models)} models take requests"


def _notes(look: Mapping[str, Any], heard: Heard) -> Iterator[tuple[str, str]]:
    """What somebody should know, most pressing first: (tone, sentence)."""
    if heard.state is None:
        since = "" if heard.since_unix_s is None else f"Since {_clock(heard.since_unix_s)}: "
        yield "bad", f"Nothing is known of memory, and no load begins. {since}{heard.problem}"
    if look["configuration"]["problem"]:
        problem = look["configuration"]["problem"]
        yield "warn", f"The configuration has changed and cannot be used: {problem}"
    state = heard.state or {}
    if state.get("recovering"):
        yield "warn", "The daemon has just started: former workers may come back first."
    if state.get("drained"):
        yield "warn", "Drained: no load begins until `umadctl resume`."
    if state.get("closed"):
        yield "bad", "Memory is below its reserve: nothing is granted."
    if state.get("pressed"):
        yield "warn", "Tasks stall on memory: twice the reserve is kept."
    if state.get("daemon", {}).get("conservative"):
        yield "", "Conservative mode: half of the memory may be booked."
    sample = state.get("sample") or {}
    if sample.get("age_s", 0) > STALE_S:
        yield "bad", f"The last look at memory was {_seconds(sample['age_s'])} ago."
    for anomaly in sample.get("anomalies", ()):
        yield "warn", f"A reading contradicts itself: {anomaly}"
    if state.get("fragmentation", {}).get("risk") == "high":
        yield "warn", f"Free memory is fragmented: {state['fragmentation']['reason']}"


def _pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    """A pool with its bar: what is used, what can be granted, and what lies between the two."""
    capacity, used, free = pool["capacity"], pool["used"], pool["free"]
    known = None not in (capacity, used, free)
    binding = _BINDING.get(pool["binding"], pool["binding"])
    return {
        **pool,
        "taken": capacity - free if known else None,
        "kept": max(0, capacity - used - free) if known else None,
        "bound_by": pool["problem"] or binding,
    }


def _model(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    words, tone = _STATES[model["state"]]
    places = model["requests"]
    # A request at an instance that is not loaded waits, whatever that one takes at once.
    loaded = (one for one in model.get("instances", [model]) if one["state"] in _LOADED)
    at_work = min(places, sum(one["takes"] for one in loaded))
    error = model["error"]
    return {
        "name": name,
        "kind": model["kind"],
        "state": words,
        "tone": tone,
        "ratio": model["ratio"] if words == "loading" else None,
        "stage": model["stage"] if words == "loading" else "",
        "device": model["device"],
        "why": error["message"] if error and model["state"] not in TAKES_REQUESTS else "",
        "at_work": at_work,
        "queued": places - at_work,
        "quota": model["quota"],
    }


def _groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The workers by the process they live in; what it physically holds is known of that one."""
    return [
        {
            **process,
            "verdict": _VERDICTS.get(process["verdict"], process["verdict"]),
            "members": [
                {**worker, "tone": _WORKER_TONES.get(worker["state"], "")}
                for worker in state["workers"]
                if worker["pid"] == process["pid"]
            ],
        }
        for process in state["processes"]
    ]


def _scale(workers: Sequence[Mapping[str, Any]]) -> int | None:
    """Of all bars of workers: the most that one of them may hold or has booked."""
    return max((max(one["quota"], one["peak"], one["booked"]) for one in workers), default=None)


def _waiter(waiter: Mapping[str, Any]) -> dict[str, Any]:
    return {**waiter, "for": _WAITS.get(waiter["what"], _INIT)}
