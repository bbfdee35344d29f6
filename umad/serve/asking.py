"""The jobs of one request at the engine: what they say, and the client's hang-up.

Owns ``Asked`` and ``Asking``.  Rules: a client that hangs up has all its jobs cancelled at once,
whatever its answer waits for; what an answer has grown by is held until it is taken, joined to one
text, so that a slow reader costs no more than its answer; of several jobs the first to fail ends
all.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from umad.config import ModelSettings, Settings
from umad.errors import InvalidParams, ModelNotFound, WaitedTooLong
from umad.serve.gate import Gate
from umad.serve.link import EngineLink
from umad.serve.spans import CLIENT_GONE, Span, span_of

Result = Mapping[str, Any]


class ClientGone(Exception):
    """The client hung up before its answer was there."""


class Asking:
    """Asks the engine, for all routes.

    Attributes:
        models: those that are configured, by name.
    """

    def __init__(self, engine: EngineLink, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.models: dict[str, ModelSettings] = {}
        self.wait_max_s = 0.0

    def follow(self, settings: Settings) -> None:
        """Serve by these settings from now on."""
        self.models = {model.name: model for model in settings.models}
        self.wait_max_s = settings.serve.wait_max

    def find(self, name: str) -> ModelSettings:
        """The model of that name.

        Raises:
            ModelNotFound: there is none.
        """
        model = self.models.get(name)
        if model is None:
            raise ModelNotFound(
                "no model of that name is configured; see /v1/models",
                details={"models": list(self.models), "param": "model"},
            )
        return model

    def ready(self, request: Request, name: str, kinds: Sequence[str]) -> str:
        """The kind of a model that takes requests; the request is counted as one for it.

        Raises:
            InvalidParams: it is of another kind than the route takes.
            UmadError: there is no such model, or it takes no requests now.
        """
        model = self.find(name)
        span_of(request.scope).model = name
        if model.kind not in kinds:
            raise InvalidParams(
                f"{name} is of kind {model.kind}; this route takes {' or '.join(kinds)}",
                details={"param": "model"},
            )
        self._engine.check(name)
        return model.kind

    @contextlib.contextmanager
    def ask(
        self, request: Request, name: str, jobs: Sequence[Mapping[str, Any]], *, stream: bool
    ) -> Iterator["Asked"]:
        """Have jobs done for a request, until the end of the context.

        Raises:
            Overloaded: the model's queue is full.
        """
        span = span_of(request.scope)
        with self._gate.places_for(name, len(jobs), self._engine.at_once(name)):
            left_s = max(0.0, self.wait_max_s - span.seconds.get("gate", 0.0))
            works = [
                partial(
                    self._engine.run,
                    name,
                    job,
                    # Each open job needs an id of its own.
                    request=span.ident if len(jobs) == 1 else f"{span.ident}.{index}",
                    deadline_s=left_s,
                )
                for index, job in enumerate(jobs)
            ]
            asked = Asked(request, span, works, stream=stream)
            try:
                yield asked
            finally:
                asked.close()

    async def results(
        self, request: Request, name: str, jobs: Sequence[Mapping[str, Any]]
    ) -> list[Result]:
        """The whole answers, in the order of the jobs."""
        with self.ask(request, name, jobs, stream=False) as asked:
            found = {index: news async for index, news in asked if not isinstance(news, str)}
        return [found[index] for index in range(len(jobs))]


class Asked:
    """Jobs at the engine.  Iterating gives (index, what the text grew by) and (index, result).

    Iterating raises ``ClientGone`` or the first job's ``UmadError``.
    """

    def __init__(
        self, request: Request, span: Span, works: "Sequence[partial[Any]]", *, stream: bool
    ) -> None:
        self._span = span
        self._began_s = span.age_s
        self._texts: list[list[str]] = [[] for _ in works]
        self._ended: deque[tuple[int, Result]] = deque()
        self._queued_s: float | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.ensure_future(self._run(index, work, stream=stream))
            for index, work in enumerate(works)
        ]
        self._tasks.append(asyncio.ensure_future(_hang_up(request)))
        for task in self._tasks:
            task.add_done_callback(self._on_done)

    async def __aiter__(self) -> AsyncIterator[tuple[int, str | Result]]:
        """See the class."""
        left = len(self._texts)
        while left:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            # Both at once: a text that comes while the reader is busy belongs before its end.
            texts, self._texts = self._texts, [[] for _ in self._texts]
            ended, self._ended = self._ended, deque()
            for index, text in enumerate(texts):
                if text:
                    yield index, "".join(text)
            for index, result in ended:
                yield index, result
            left -= len(ended)

    def close(self) -> None:
        """Cancel what is still at work, and count the time."""
        for task in self._tasks:
            task.cancel()
        took_s = self._span.age_s - self._began_s
        if self._queued_s is None:  # it never began, or it did not say when
            self._queued_s = took_s if isinstance(self._failure, WaitedTooLong) else 0.0
        queued_s = min(self._queued_s, took_s)
        self._span.add("queue", queued_s)
        self._span.add("engine", took_s - queued_s)

    async def _run(self, index: int, work: "partial[Any]", *, stream: bool) -> None:
        result = await work(on_chunk=partial(self._say, index) if stream else None)
        self._span.device = result.get("device") or self._span.device
        queued_s = result.get("queued_s")
        if queued_s is not None:
            self._queued_s = max(queued_s, self._queued_s or 0.0)
        self._ended.append((index, result))
        self._changed.set()

    def _say(self, index: int, text: str, device: str | None) -> None:
        self._span.device = device or self._span.device
        if self._span.first_s is None:
            self._span.first_s = self._span.age_s
        self._texts[index].append(text)
        self._changed.set()

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._failure is None:
            self._failure = error
        for other in self._tasks:
            other.cancel()
        self._changed.set()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    span_of(request.scope).code = CLIENT_GONE
    raise ClientGone
