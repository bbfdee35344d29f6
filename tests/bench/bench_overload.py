"""Twice the load that can be sustained, by chance as from many people, on two models in quotas.

BENCH_SECONDS of it, 60 where that is not set.  First what 64 askers of each get, both at once, is
measured; twice that rate is then sent whatever happens, as ``umadctl bench`` does it.  One refusal
in ten is followed up: asked again, once, at the second that its Retry-After names, and beside it a
new one.  In the midst of the load half must be refused whatever was named: there it came true when
who asks again has the chance of who comes for the first time.  A time after the load's end came
true when who asks again then is served.

Expected, before the first run: half are refused, nearly all with 429; no out-of-memory error; the
quota is used to 95 % and never passed; who asks again in the midst has the chance of all others,
and 99 % of those who come after the load are served.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.client import Answer, Client
from tests.bench.figures import Figure
from tests.bench.server import started, umad_up
from tests.daemon.running import eventually
from tests.demo import ask
from tests.demo.fixtures import checkpoints, minilm
from tests.demo.run import free_port
from umad.cli.load import KINDS, Plan, due_times, request_of
from umad.units import MIB

SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))
WARM_UP_S, SUSTAINED_S = 10.0, 10.0
ANSWER_S = 60.0
ASKERS = 64
TIMES = 2.0
FOLLOWED = 10  # one refusal of so many
QUOTAS = {"embed": 128 * MIB, "talk": 64 * MIB}
SERVE = 'requests_max = 64\nrequests_per_client_max = 256\nwait_max = "5s"\n'
# Room for the quotas and nothing else, so that no burst lifts a limit.
RUNTIME = 1200 * MIB
OUT_OF_MEMORY = ("quota_exceeded", "worker_revoked", "worker_lost", "model_failed", "never_fits")


Outcomes = Counter[str]
PLANS = (
    Plan("", "embeddings", "embed", ((8, 80.0), (100, 20.0))),
    Plan("", "completions", "talk", ((8, 50.0), (300, 50.0))),
)


@dataclass
class Refusals:
    """How many named no time; and whether those that were followed up were served then, and a
    request that came for the first time at that moment."""

    load_ends_s: float
    count: int = 0
    unnamed: int = 0
    within: list[list[bool]] = field(default_factory=list)
    after: list[list[bool]] = field(default_factory=list)


def run() -> list[Figure]:
    port = free_port()
    kept = {"embed": ("embedding", minilm()), "talk": ("chat", checkpoints() / "llama")}
    models = {
        name: {"kind": kind, "path": str(path), "quota": f"{QUOTAS[name]}B"}
        for name, (kind, path) in kept.items()
    }
    serve = f'{SERVE}runtime_quota = "{RUNTIME}B"'
    memory = f'budget = "{RUNTIME + sum(QUOTAS.values())}B"'
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        command = umad_up(Path(folder), port, models, serve, memory)
        with started(command, Path(folder), {}):
            address = f"127.0.0.1:{port}"
            eventually(lambda: ask.get(address, "/readyz").status == 200, 120)
            return asyncio.run(_measure(port))


async def _measure(port: int) -> list[Figure]:
    client = Client(port)
    before = _figures(port)
    found = await asyncio.gather(*(_closed(client, plan) for plan in PLANS))
    _show("sustained", found)
    rates = [outcomes["200"] / SUSTAINED_S for outcomes in found]
    assert all(rates), "nothing was answered"
    refusals = Refusals(time.monotonic() + SECONDS)
    loads = zip(PLANS, rates, strict=True)
    found = await asyncio.gather(*(_open(client, *load, refusals) for load in loads))
    _show("overload", found)
    return _judged(rates, sum(found, Counter()), refusals, before, _figures(port))


async def _closed(client: Client, plan: Plan) -> Outcomes:
    """What is served to those who ask again at once, after a warm-up; by kind of outcome."""
    outcomes: Outcomes = Counter()
    numbers = itertools.count()
    began_s = time.monotonic() + WARM_UP_S

    async def asker() -> None:
        while (now_s := time.monotonic()) < began_s + SUSTAINED_S:
            answer = await _send(client, plan, next(numbers))
            if now_s >= began_s:
                outcomes[_kind(answer)] += 1

    await asyncio.gather(*(asker() for _ in range(ASKERS)))
    return outcomes


async def _open(client: Client, plan: Plan, rate: float, refusals: Refusals) -> Outcomes:
    """Requests by chance, however they are answered."""
    outcomes: Outcomes = Counter()
    fresh = itertools.count(1_000_000_000)
    began_s = time.monotonic()

    async def send(number: int) -> None:
        answer = await _send(client, plan, number)
        outcomes[_kind(answer)] += 1
        if answer is None or answer.status not in (429, 503):
            return
        refusals.count += 1
        if answer.retry_after is None:
            refusals.unnamed += 1
        elif refusals.count % FOLLOWED == 0:
            due_s = time.monotonic() + answer.retry_after
            await asyncio.sleep(answer.retry_after)
            both = await asyncio.gather(
                *(_send(client, plan, one) for one in (number, next(fresh)))
            )
            came = refusals.within if due_s < refusals.load_ends_s else refusals.after
            came.append([one is not None and one.status == 200 for one in both])

    async with asyncio.TaskGroup() as group:
        due = due_times(TIMES * rate, SECONDS, random.Random(plan.model))
        for number, due_s in enumerate(due):
            await asyncio.sleep(began_s + due_s - time.monotonic())
            group.create_task(send(number))
    return outcomes


async def _send(client: Client, plan: Plan, number: int) -> Answer | None:
    """One request, different for each number; None: no answer."""
    chance = random.Random(f"{plan.model} {number}")
    lengths, weights = zip(*plan.mix, strict=True)
    asked = request_of(plan, chance.choices(lengths, weights)[0], chance)
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return await client.post(KINDS[plan.kind][0], asked["json"])
    return None


def _kind(answer: Answer | None) -> str:
    """200, or a status and its code."""
    if answer is None:
        return "none"
    if answer.status == 200:
        return "200"
    with suppress(ValueError, KeyError, TypeError):
        return f"{answer.status} {json.loads(answer.content)['error']['code']}"
    return f"{answer.status} ?"


def _show(phase: str, found: Sequence[Outcomes]) -> None:
    for plan, outcomes in zip(PLANS, found, strict=True):
        print(f"{phase}, {plan.model}: {dict(outcomes.most_common())}", file=sys.stderr)


def _figures(port: int) -> dict[tuple[str, str], float]:
    """The server's own, by name and worker."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
        text = answer.read().decode()
    return {
        (one.name, one.labels.get("worker", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def _judged(
    rates: list[float],
    outcomes: Outcomes,
    refusals: Refusals,
    before: dict[tuple[str, str], float],
    after: dict[tuple[str, str], float],
) -> list[Figure]:
    total = outcomes.total()
    statuses: Outcomes = Counter()
    for kind, count in outcomes.items():
        statuses[kind.partition(" ")[0]] += count
    shown = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
    restarts = ("umad_serve_engine_restarts_total", "")
    lost = after[restarts] - before[restarts]
    lost += sum(count for kind, count in outcomes.items() if kind.endswith(OUT_OF_MEMORY))
    strange = total - sum(statuses[one] for one in ("200", "429", "503"))
    load = f"{SECONDS:g} s at {TIMES:g} x {' + '.join(f'{rate:.0f}/s' for rate in rates)}"
    made = [
        _none(f"out-of-memory errors and engines lost in {load}: {shown}", lost, total),
        _none("answers that were neither 200 nor 429 nor 503", strange, total),
        _none("refusals without Retry-After", refusals.unnamed, refusals.count),
        _share("amid the load", refusals.within, lambda others: 0.9 * others, ">= 0.9 x rival"),
        _share("after the load", refusals.after, lambda _: 0.99, ">= 0.99"),
    ]
    for name, quota in QUOTAS.items():
        peak = after["umad_worker_peak_bytes", name]
        used = peak / quota
        title = f"{name}: the most that it held, of {quota / MIB:.0f} MiB"
        well = 0.9 <= used <= 1
        made.append(Figure("overload", title, used, "ratio", "0.9..1", None, 1, used, used, well))
    return made


def _none(figure: str, value: float, of: int) -> Figure:
    return Figure("overload", figure, value, "count", "<= 0", None, of, value, value, value <= 0)


def _share(
    when: str, came: list[list[bool]], limit: Callable[[float], float], target: str
) -> Figure:
    """Nobody's is 0, and does not pass."""
    told, others = (sum(one[at] for one in came) / max(1, len(came)) for at in (0, 1))
    title = f"asked again as told, {when}: served; rival: new ones at the same moment"
    well = bool(came) and told >= limit(others)
    return Figure("overload", title, told, "ratio", target, others, len(came), told, told, well)
