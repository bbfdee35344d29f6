"""What the tests of the front share: a configuration, an engine's stand-in, a served front."""

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, replace
from typing import Any

import httpx
from starlette.applications import Starlette

from umad.config import Settings, parse
from umad.errors import UmadError
from umad.serve.app import create_app
from umad.serve.gate import Gate
from umad.serve.http import make_server
from umad.serve.link import EngineLink, LinkPeer, ModelState, link_limits

KINDS = {
    "talk": "chat",
    "see": "vision",
    "paint": "image",
    "hear": "speech",
    "embed": "embedding",
}
CONFIG = "\n".join(
    f'[[model]]\nname = "{name}"\nkind = "{kind}"\npath = "/nowhere"\nquota = "1GiB"\n'
    for name, kind in KINDS.items()
)
READY = ModelState("ready", "serving", 1.0, 1000)
Emit = Callable[..., None]
Handler = (
    Callable[[str, Mapping[str, Any]], Awaitable[Any]]
    | Callable[[str, Mapping[str, Any], Emit], Awaitable[Any]]
)


def make_settings(**serve: Any) -> Settings:
    settings = parse(CONFIG)
    # However few cores the machine of the tests has.
    return replace(settings, serve=replace(settings.serve, **{"requests_max": 100, **serve}))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario; nothing may be left behind in the loop but what it cancelled."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.005)


class StandIn:
    """The engine's end of the link in this loop: answers ``run`` with what ``handler`` returns.

    A handler of three arguments gets (model, job, emit): ``emit(text, device=None)`` sends a chunk,
    where the front has asked for a stream, and nothing where it has not.
    """

    def __init__(self, settings: Settings, handler: Handler) -> None:
        self.settings = settings
        self.handler = handler
        self.jobs: list[tuple[str, Mapping[str, Any]]] = []
        self.streamed: list[bool] = []  # of each job, whether a stream was asked for
        self.cancelled: list[str] = []
        self.awake = True  # answers a ping
        self.at_work = self.at_work_max = 0
        self.lost = asyncio.Event()
        self.peer = LinkPeer(
            "server",
            link_limits(settings),
            on_request=self._on_request,
            on_notification=lambda _, params: self.cancelled.append(params["request"]),
            on_lost=self.lost.set,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, model: str, state: ModelState, instance: int = 0) -> None:
        self.peer.notify("state", {"model": model, "instance": instance, **asdict(state)})

    def _on_request(self, ident: int, method: str, params: dict[str, Any]) -> None:
        if method == "ping":
            if self.awake:
                self.peer.answer(ident)
            return
        assert method == "run"
        self.jobs.append((params["model"], params["job"]))
        self.streamed.append(params.get("stream", False))
        task = asyncio.ensure_future(self._work(ident, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, ident: int, params: dict[str, Any]) -> None:
        self.at_work += 1
        self.at_work_max = max(self.at_work, self.at_work_max)
        given: list[Any] = [params["model"], params["job"]]

        def emit(text: str, device: str | None = None) -> None:
            if params.get("stream", False):
                chunk = {"request": params["request"], "text": text, "device": device}
                self.peer.notify("chunk", chunk)

        if len(inspect.signature(self.handler).parameters) == 3:
            given.append(emit)
        try:
            self.peer.answer(ident, result=await self.handler(*given))
        except UmadError as error:
            self.peer.answer(ident, error=error.to_wire())
        finally:
            self.at_work -= 1

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.peer.close()


async def text_handler(_model: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Echoes the last message or the prompt."""
    said = job["prompt"] if "prompt" in job else job["messages"][-1]["content"]
    return {"text": said, "prompt_tokens": 3, "completion_tokens": 2, "finish_reason": "stop"}


class Front:
    """A front over a real socket, and its stand-in engine (None: never attached)."""

    def __init__(
        self, client: httpx.AsyncClient, link: EngineLink, port: int, app: Starlette
    ) -> None:
        self.client = client
        self.link = link
        self.port = port
        self.gate: Gate = app.state.front.gate
        self.server = make_server(app)
        self.engine: StandIn | None = None

    async def attach(self, settings: Settings, handler: Handler) -> StandIn:
        ours, theirs = socket.socketpair()
        self.engine = StandIn(settings, handler)
        await self.engine.peer.open(theirs)
        await self.link.attach(ours)
        for name in KINDS:
            self.engine.tell(name, READY)
        await until(lambda: self.link.ready()[0] == len(KINDS))
        return self.engine

    async def chat(self, content: Any = "hello", model: str = "talk", **more: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
        return await self.client.post("/v1/chat/completions", json=body)


@contextlib.asynccontextmanager
async def serving(
    settings: Settings | None = None, handler: Handler | None = text_handler
) -> AsyncIterator[Front]:
    """Serve a front on a free port; ``handler`` None leaves it without an engine."""
    settings = settings or make_settings()
    link = EngineLink(settings)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    app = create_app(settings, link)
    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits, trust_env=False
    ) as client:
        front = Front(client, link, port, app)
        served = asyncio.ensure_future(front.server.serve(sockets=[listener]))
        await until(lambda: front.server.started)
        try:
            if handler is not None:
                await front.attach(settings, handler)
            yield front
        finally:
            if front.engine is not None:
                front.engine.end()
            link.drop()
            await until(lambda: not link.describe()["running"])
            front.server.should_exit = True
    await served
