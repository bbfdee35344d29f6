"""umad-serve against other servers' dynamic batching, over HTTP, each with the machine to itself.

The real all-MiniLM-L6-v2 on one torch thread, 32 askers, the same texts in the same order.  Every
round starts each contestant afresh, warms it up, asks, and ends it.  The rivals are told what they
need for this (a batch of 32, 10 ms of waiting, as many requests at once as come), and so is umad
(``requests_max``: by itself it takes 8 on 2 cores).  They live in an environment of their own,
.work/rivals, which the first run makes; one that cannot be had is left out and named.

Expected, before the first run: short texts 1.25 x LitServe and 0.7 x offline batches; mixed ones
2.2 x the best rival, whose forwards are all padded to 100 words; the short ones of these at a
third of its p95; the long ones wait longest, but less than twice as long as there.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.client import Client
from tests.bench.figures import Figure, ratio
from tests.bench.server import cpu_s, started, umad_up
from tests.daemon.running import ROOT
from tests.demo.fixtures import minilm
from tests.demo.run import free_port

ROUNDS = 5
ASKERS = 32
START_S, ASK_S = 120.0, 120.0
SHORT, LONG = 8, 100
COUNTS = {"short": 1024, "mixed": 320}
WORDS = "the harbour master paints a small blue boat before the captain sails at noon".split()  # noqa: SIM905
ENVIRONMENT = {
    "BENTOML_DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token is left in the home folder
}
HOME = ROOT / ".work" / "rivals"
PACKAGES = {"LitServe": "litserve", "BentoML": "bentoml", "Ray Serve": "ray[serve]"}
OURS = "umad"
ALONE = "one by one"
SERVE = 'requests_max = 64\nruntime_quota = "1500MiB"'


@dataclass
class Seen:
    """What one contestant showed under one load, by round."""

    each_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of the server and whom it has started, for each request."""
    short_p95_s: list[float] = field(default_factory=list)
    long_max_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Contestant:
    """How to start a server at a port, with a folder for its files; and how it is asked."""

    command: Sequence[str]
    path: str = "/embed"
    text: str = "input"
    many: bool = False
    """It takes a list of texts."""

    async def ask(self, client: Client, text: str) -> bytes:
        asked = [text] if self.many else text
        answer = await client.post(self.path, {"model": "embed", self.text: asked})
        if answer.status != 200:
            raise Refused(answer.status)
        return answer.content


class Refused(Exception):
    """An answer that is none."""


def run() -> list[Figure]:
    python, missing = prepared()
    contestants = {OURS: Contestant([], "/v1/embeddings")} | {
        name: one for name, one in rivals(python).items() if name not in missing
    }
    texts = {load: texts_of(load) for load in COUNTS}
    seen = {(name, load): Seen() for name in contestants for load in COUNTS}
    offline: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            with (
                tempfile.TemporaryDirectory(prefix="umad-") as folder,
                serving(contestant, Path(folder)) as (port, pid),
            ):
                for load in COUNTS:
                    asyncio.run(_ask(contestant, port, pid, texts[load], seen[name, load]))
        for load in COUNTS:
            for order, each_s in batches(texts[load]).items():
                offline.setdefault((order, load), []).append(each_s)
    table(seen, offline)
    return figures(seen, offline, [name for name in PACKAGES if name in missing])


def table(seen: dict[tuple[str, str], Seen], offline: dict[tuple[str, str], list[float]]) -> None:
    """All of it, for people."""
    print("contestant, texts: texts/s, p95 of the short, longest wait of the long", file=sys.stderr)
    for (name, load), found in seen.items():
        rate, p95_s, long_s = (
            statistics.median(values)
            for values in (found.each_s, found.short_p95_s, found.long_max_s)
        )
        cpu_ms = statistics.median(found.cpu_s) * 1000
        print(
            f"{name}, {load}: {1 / rate:.1f}/s, {p95_s * 1000:.0f} ms, {long_s * 1000:.0f} ms; "
            f"{cpu_ms:.2f} ms of CPU each",
            file=sys.stderr,
        )
    for (order, load), each_s in offline.items():
        print(f"offline {order}, {load}: {1 / statistics.median(each_s):.1f}/s", file=sys.stderr)


def figures(
    seen: dict[tuple[str, str], Seen], offline: dict[tuple[str, str], list[float]], out: list[str]
) -> list[Figure]:
    """Ours beside the best of them in each respect."""
    others = [name for name in PACKAGES if (name, "mixed") in seen]
    note = f"; left out, cannot be installed: {', '.join(out)}" if out else ""
    us = {load: seen[OURS, load] for load in COUNTS}
    made = [
        ratio(
            "rivals",
            f"short texts: time of one, umad over offline batches as they come{note}",
            us["short"].each_s,
            offline["unsorted", "short"],
            1 / 0.70,
        )
    ]
    if "LitServe" in others:
        theirs = seen["LitServe", "short"].each_s
        title = "short texts: time of one, umad over LitServe"
        made.append(ratio("rivals", title, us["short"].each_s, theirs, 1 / 1.2))
    for title, of, limit in (
        ("time of one", "each_s", 1 / 1.8),
        ("p95 of the short ones", "short_p95_s", 1.0),
        ("longest wait of a long one", "long_max_s", 2.0),
    ):
        if others:
            best = min(others, key=lambda name: statistics.median(getattr(seen[name, "mixed"], of)))
            theirs = getattr(seen[best, "mixed"], of)
            whole = f"mixed texts: {title}, umad over the best rival ({best})"
            made.append(ratio("rivals", whole, getattr(us["mixed"], of), theirs, limit))
    return made


def texts_of(load: str) -> list[str]:
    """Short ones; or each fifth a long one."""
    chance = random.Random(load)
    lengths = [LONG if load == "mixed" and at % 5 == 4 else SHORT for at in range(COUNTS[load])]
    return [" ".join(chance.choices(WORDS, k=length)) for length in lengths]


def prepared() -> tuple[str, list[str]]:
    """The rivals' interpreter, and who could not be installed.

    It reads this project's own packages (torch above all) where it has none of its own.
    """
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME)
    (site,) = HOME.glob("lib/python3*/site-packages")
    (site / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    pinned = next(
        line
        for line in (ROOT / "tests" / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    missing = [
        name
        for name, package in PACKAGES.items()
        if not list(site.glob(f"{package.partition('[')[0]}-*.dist-info"))
        and subprocess.run([*pip, pinned, package], stdout=sys.stderr, check=False).returncode
    ]
    return str(python), missing


def rivals(python: str) -> dict[str, Contestant]:
    module = [python, "-m"]
    bento = ["bentoml", "serve", "tests.bench.rivals.bento:Embed", "--host=127.0.0.1"]
    return {
        ALONE: Contestant([*module, "tests.bench.rivals.alone", "{port}"]),
        "LitServe": Contestant([*module, "tests.bench.rivals.litserve", "{port}"]),
        "BentoML": Contestant([*module, *bento, "--port={port}"], text="texts", many=True),
        "Ray Serve": Contestant([*module, "tests.bench.rivals.rayserve", "{port}", "{folder}"]),
    }


# --- one contestant -----------------------------------------------------------------------------


@contextmanager
def serving(contestant: Contestant, folder: Path) -> Iterator[tuple[int, int]]:
    """A contestant from its first answer to its end: its port and pid."""
    port = free_port()
    command = [one.format(port=port, folder=folder) for one in contestant.command]
    environment = {"BENTOML_HOME": str(folder)} | ENVIRONMENT
    with started(command or _umad(folder, port), folder, environment) as process:
        asyncio.run(_first(contestant, port, process))
        yield port, process.pid


def _umad(folder: Path, port: int) -> list[str]:
    """The product, with a model beside it that is not loaded: so each gets one of two cores."""
    models = {
        "embed": {"kind": "embedding", "path": str(minilm()), "quota": "400MiB"},
        "other": {"kind": "embedding", "path": str(minilm()), "quota": "1MiB", "load": "request"},
    }
    return umad_up(folder, port, models, SERVE, 'budget = "4GiB"')


async def _first(contestant: Contestant, port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait for the first answer."""
    client = Client(port)
    async with asyncio.timeout(START_S):
        while True:
            assert process.poll() is None, "it ended"
            with suppress(OSError, asyncio.IncompleteReadError, Refused):
                answer = await contestant.ask(client, "hello")
                client.close()
                assert len(vector_of(json.loads(answer))) == 384
                return
            await asyncio.sleep(0.2)


async def _ask(
    contestant: Contestant, port: int, pid: int, texts: Sequence[str], seen: Seen
) -> None:
    """All texts by all askers, each its next one as soon as it has its answer."""
    client = Client(port)

    async def all_of(numbered: Iterator[tuple[int, str]]) -> None:
        async def asker() -> None:
            for number, text in numbered:
                began_s = time.perf_counter()
                await contestant.ask(client, text)
                took[number] = time.perf_counter() - began_s

        async with asyncio.timeout(ASK_S):
            await asyncio.gather(*(asker() for _ in range(ASKERS)))

    took: dict[int, float] = {}
    await all_of(enumerate(texts[: 4 * ASKERS]))  # it warms up
    took.clear()
    began_s, spent_s = time.perf_counter(), cpu_s(pid)
    await all_of(enumerate(texts))
    seen.each_s.append((time.perf_counter() - began_s) / len(texts))
    seen.cpu_s.append((cpu_s(pid) - spent_s) / len(texts))
    short = sorted(took[number] for number, text in enumerate(texts) if len(text.split()) == SHORT)
    seen.short_p95_s.append(short[int(0.95 * len(short))])
    long = [took[number] for number, text in enumerate(texts) if len(text.split()) == LONG]
    seen.long_max_s.append(max(long, default=0.0))
    client.close()


def vector_of(answer: Any) -> list[float]:
    """Wherever it is in there."""
    while not (isinstance(answer, list) and isinstance(answer[0], float)):
        answer = (
            answer[0] if isinstance(answer, list) else answer.get("data", answer.get("embedding"))
        )
    return answer


def batches(texts: Sequence[str]) -> dict[str, float]:
    """Seconds of a text without a server, unsorted and sorted."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.rivals.offline"],
        cwd=ROOT,
        input=json.dumps(texts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found
