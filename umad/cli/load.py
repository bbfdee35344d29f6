"""Load on an OpenAI-compatible server, and what became of each request.

Owns when requests are sent, what they hold, and how one is timed.  Rules: an open loop keeps its
pace whatever the server does, and a request's time counts from when it was due, not from when this
program got round to it; every request has an input of its own, so that no cache answers it; what
this program itself cost is measured, too.
"""

import asyncio
import io
import itertools
import json
import random
import time
import wave
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

KINDS: Final[Mapping[str, tuple[str, str, int]]] = {
    "chat": ("/v1/chat/completions", "chat", 32),
    "completions": ("/v1/completions", "chat", 32),
    "embeddings": ("/v1/embeddings", "embedding", 16),
    "transcriptions": ("/v1/audio/transcriptions", "speech", 5),
    "images": ("/v1/images/generations", "image", 10),
}
"""Route, umad's kind of model, and the length of an input: words, or seconds of sound."""
IN_FLIGHT_MAX: Final = 4096  # below common limits of open files
REQUESTS_MAX: Final = 1_000_000
ERROR_PAUSE_S: Final = 0.1  # in a closed loop: who is refused at once must not ask as fast
_SOUND_HZ: Final = 16_000
_TEXT: Final = (
    "river stone light garden winter paper window music bread silver morning engine letter "
    "forest market summer bridge number colour harbour table island signal copper pocket"
)
_WORDS: Final = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send.

    ``rate`` is in requests a second (open loop), else ``clients`` send one after the other (closed
    loop); ``mix`` is of (length, weight), lengths as in ``KINDS``.
    """

    url: str
    kind: str
    model: str
    mix: tuple[tuple[int, float], ...]
    rate: float | None = None
    clients: int = 1
    warm_up_s: float = 5.0
    duration_s: float = 30.0
    timeout_s: float = 60.0
    max_tokens: int = 16
    size: str | None = None
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """One request that was due while it was measured.

    ``at_s`` is when it was due, after the warm-up; ``late_s`` how much later it was sent;
    ``seconds`` and ``first_s`` (of a stream's first text) count from when it was due; ``tokens``
    are of the answer; ``error`` is empty, or what kind.
    """

    length: int
    at_s: float
    late_s: float = 0.0
    seconds: float = 0.0
    first_s: float | None = None
    tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Measured:
    """All of it: ``cpu_s`` is this program's own, over ``wall_s``."""

    outcomes: list[Outcome] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0


def due_times(rate: float, total_s: float, chance: random.Random) -> Iterator[float]:
    """When requests are due that come by chance, ``rate`` a second: a Poisson process."""
    at_s = chance.expovariate(rate)
    while at_s < total_s:
        yield at_s
        at_s += chance.expovariate(rate)


async def generate(client: "httpx.AsyncClient", plan: Plan) -> Measured:
    """Send it all and wait for the answers, at most ``timeout_s`` for each."""
    measured = Measured()
    chance = random.Random(plan.seed)
    lengths, weights = zip(*plan.mix, strict=True)
    numbers = itertools.count()
    began_s, cpu_s = time.monotonic(), time.process_time()
    total_s = plan.warm_up_s + plan.duration_s

    def drawn() -> tuple[int, Callable[[], Mapping[str, Any]]]:
        length = chance.choices(lengths, weights)[0]
        text = random.Random(f"{plan.seed} {next(numbers)}")
        return length, lambda: request_of(plan, length, text)

    async def send(due_s: float) -> bool:
        length, build = drawn()
        outcome = Outcome(length, due_s - plan.warm_up_s)
        made = build()
        outcome.late_s = time.monotonic() - began_s - due_s
        await _timed(client, plan, made, outcome, began_s + due_s)
        if outcome.at_s >= 0:
            measured.outcomes.append(outcome)
        return bool(outcome.error)

    async def one_after_the_other() -> None:
        while (now_s := time.monotonic() - began_s) < total_s:
            if await send(now_s):
                await asyncio.sleep(ERROR_PAUSE_S)

    if plan.rate is None:
        await asyncio.gather(*(one_after_the_other() for _ in range(plan.clients)))
    else:
        await _open_loop(plan, plan.rate, began_s, send, measured)
    measured.wall_s = time.monotonic() - began_s
    measured.cpu_s = time.process_time() - cpu_s
    return measured


async def _open_loop(
    plan: Plan,
    rate: float,
    began_s: float,
    send: Callable[[float], Coroutine[Any, Any, bool]],
    measured: Measured,
) -> None:
    open_now: set[asyncio.Task[bool]] = set()
    total_s = plan.warm_up_s + plan.duration_s
    for due_s in due_times(rate, total_s, random.Random(f"{plan.seed} due")):
        await asyncio.sleep(began_s + due_s - time.monotonic())
        if len(open_now) >= IN_FLIGHT_MAX:
            if due_s >= plan.warm_up_s:
                missed = Outcome(0, due_s - plan.warm_up_s, error=f"not sent: {IN_FLIGHT_MAX} open")
                measured.outcomes.append(missed)
            continue
        task = asyncio.ensure_future(send(due_s))
        open_now.add(task)
        task.add_done_callback(open_now.discard)
    await asyncio.gather(*open_now)


def request_of(plan: Plan, length: int, chance: random.Random) -> Mapping[str, Any]:
    """The arguments of one request, for httpx."""
    if plan.kind == "transcriptions":
        form = {"model": plan.model, "response_format": "json"}
        return {"data": form, "files": {"file": ("noise.wav", _noise(length, chance))}}
    text = " ".join(chance.choices(_WORDS, k=length))
    asked: dict[str, Any] = {"model": plan.model}
    if plan.kind == "chat":
        asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": plan.max_tokens}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    elif plan.kind == "completions":
        asked |= {"prompt": text, "max_tokens": plan.max_tokens}
    elif plan.kind == "embeddings":
        asked |= {"input": text, "encoding_format": "base64"}
    else:
        asked |= {"prompt": text, "response_format": "b64_json"}
        asked |= {} if plan.size is None else {"size": plan.size}
    return {"json": asked}


def _noise(seconds: int, chance: random.Random) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, _SOUND_HZ, 0, "NONE", ""))
        sound.writeframes(chance.randbytes(2 * _SOUND_HZ * seconds))
    return file.getvalue()


async def _timed(
    client: "httpx.AsyncClient",
    plan: Plan,
    made: Mapping[str, Any],
    outcome: Outcome,
    due_s: float,
) -> None:
    import httpx

    try:
        async with asyncio.timeout(plan.timeout_s):
            if plan.kind == "chat":
                await _stream(client, plan, made, outcome, due_s)
            else:
                answer = await client.post(_address(plan), **made)
                outcome.error = _problem(answer)
                if not outcome.error and plan.kind == "completions":
                    outcome.tokens = answer.json()["usage"]["completion_tokens"]
    except TimeoutError:
        outcome.error = "timed out"
    except httpx.ConnectError:
        outcome.error = "no connection"
    except httpx.HTTPError as error:
        outcome.error = f"connection lost ({type(error).__name__})"
    except (ValueError, KeyError, TypeError, IndexError):
        outcome.error = "answer not understood"
    outcome.seconds = time.monotonic() - due_s


async def _stream(
    client: "httpx.AsyncClient",
    plan: Plan,
    made: Mapping[str, Any],
    outcome: Outcome,
    due_s: float,
) -> None:
    async with client.stream("POST", _address(plan), **made) as answer:
        if answer.status_code != 200:
            await answer.aread()
            outcome.error = _problem(answer)
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            # Only what counts is read as JSON: this program shares the machine with the server.
            waits = outcome.first_s is None
            if not line.startswith("data: ") or not (waits or '"error"' in line or "usage" in line):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.error = f"within the stream: {_code(event)}"
                return
            if waits and any(one["delta"].get("content") for one in event["choices"]):
                outcome.first_s = time.monotonic() - due_s
            outcome.tokens = (event.get("usage") or {}).get("completion_tokens", outcome.tokens)
    outcome.error = "the stream was cut"


def _address(plan: Plan) -> str:
    return plan.url + KINDS[plan.kind][0]


def _problem(answer: "httpx.Response") -> str:
    """Empty for an answer, else its status and code."""
    if answer.status_code == 200:
        return ""
    try:
        return f"{answer.status_code} {_code(answer.json())}"
    except ValueError:
        return str(answer.status_code)


def _code(body: Any) -> str:
    """The error's code or type, as short as it should be."""
    error = body.get("error") if isinstance(body, dict) else None
    known = error if isinstance(error, dict) else {}
    return str(known.get("code") or known.get("type") or "?")[:40]
