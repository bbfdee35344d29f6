"""The HTTP front: OpenAI-compatible routes over the engine link.

Owns the routes and the form of their answers.  Rules: it holds no model and imports no torch; a
refusal is never a 500; a client that hangs up cancels its work; no log line holds what a client
wrote.  A request's way:
1. gate: share of the client, size of the body (before it is read)
2. body -> schema -> job
3. the model exists, is of the right kind, is ready or is loaded for it
4. a place in the model's queue
5. the engine's answer, or the client's hang-up
"""

import asyncio
import base64
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Final

import structlog
from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from umad.config import ModelSettings, Settings
from umad.errors import InvalidParams, ModelNotFound, UmadError
from umad.serve.gate import Gate, GateMiddleware, error_response, refusal
from umad.serve.link import EngineLink, unpack_vector
from umad.serve.metrics import MEDIA_TYPE, MODEL, FrontMetrics, MetricsMiddleware
from umad.serve.schemas import ChatBody, CompletionBody, EmbeddingBody, ImageBody

_TEXT_KINDS: Final = ("chat", "vision")
log = structlog.get_logger()


class ClientGone(Exception):
    """The client hung up before its answer was there."""


def create_app(settings: Settings, engine: EngineLink) -> FastAPI:
    """The application of one front, which is its ``state.front``.

    Args:
        settings: the whole configuration; the models and [serve] count here.
        engine: the link to the inference process, which may come and go.
    """
    # No documentation pages: they would load scripts from the network.
    app = FastAPI(title="umad", openapi_url=None, docs_url=None, redoc_url=None)
    front = Front(settings, engine)
    app.state.front = front
    for path, endpoint in (
        ("/v1/chat/completions", front.chat),
        ("/v1/completions", front.complete),
        ("/v1/embeddings", front.embed),
        ("/v1/audio/transcriptions", front.transcribe),
        ("/v1/images/generations", front.draw),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path, look in (
        ("/v1/models", front.models),
        ("/v1/models/{name}", front.model),
        ("/healthz", front.healthz),
        ("/readyz", front.readyz),
        ("/status", front.status),
        ("/metrics", front.metrics),
    ):
        app.add_api_route(path, look, methods=["GET"], response_model=None)
    app.add_exception_handler(UmadError, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(GateMiddleware, gate=front.gate)
    routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(MetricsMiddleware, metrics=front.counts, routes=routes)
    return app


class Front:
    """The endpoints and what they share.

    Attributes:
        configuration: of which moment it is, and what is wrong with a newer one, for /status.
    """

    def __init__(self, settings: Settings, engine: EngineLink) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._started_unix_s = int(time.time())
        self.gate = Gate(settings.serve, settings.models)
        self.counts = FrontMetrics(settings.daemon.socket, self._look)
        self.configuration: dict[str, Any] = {"read_unix_s": self._started_unix_s, "problem": ""}
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Serve by these settings from now on."""
        self._models = {model.name: model for model in settings.models}
        self._wait_max_s = settings.serve.wait_max
        self.gate.follow(settings.serve, settings.models)

    # --- requests -------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """POST /v1/chat/completions."""
        ident, result = await self._answer(request, body.model, _TEXT_KINDS, body.job)
        message = {"role": "assistant", "content": result["text"]}
        return JSONResponse(
            {
                "id": f"chatcmpl-{ident}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.model,
                "choices": [_choice(result, {"message": message})],
                "usage": _usage(result),
            },
            headers=_where(result),
        )

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        """POST /v1/completions."""
        ident, result = await self._answer(request, body.model, _TEXT_KINDS, body.job)
        return JSONResponse(
            {
                "id": f"cmpl-{ident}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": body.model,
                "choices": [_choice(result, {"text": result["text"]})],
                "usage": _usage(result),
            },
            headers=_where(result),
        )

    async def embed(self, request: Request, body: EmbeddingBody) -> Response:
        """POST /v1/embeddings."""
        _, result = await self._answer(request, body.model, ("embedding",), lambda _: body.job())
        form = _base64 if body.encoding_format == "base64" else unpack_vector
        return JSONResponse(
            {
                "object": "list",
                "model": body.model,
                "data": [
                    {"object": "embedding", "index": index, "embedding": form(vector)}
                    for index, vector in enumerate(result["vectors"])
                ],
                "usage": {"prompt_tokens": result["tokens"], "total_tokens": result["tokens"]},
            },
            headers=_where(result),
        )

    async def transcribe(
        self,
        request: Request,
        file: Annotated[UploadFile, File()],
        model: Annotated[str, Form(min_length=1, max_length=64)],
        language: Annotated[str | None, Form(max_length=32)] = None,
        response_format: Annotated[str, Form()] = "json",
        stream: Annotated[bool, Form()] = False,  # noqa: FBT002  a form field
    ) -> Response:
        """POST /v1/audio/transcriptions."""
        if stream:
            raise InvalidParams("streaming is not there yet; leave stream out")
        if response_format not in ("json", "text", "verbose_json"):
            raise InvalidParams("response_format is json, text or verbose_json")
        audio = await file.read()
        job = {"audio": audio, "language": language}
        _, result = await self._answer(request, model, ("speech",), lambda _: job)
        if response_format == "text":
            return PlainTextResponse(result["text"] + "\n", headers=_where(result))
        answer = {"text": result["text"]}
        if response_format == "verbose_json":
            answer |= {
                "task": "transcribe",
                "language": result.get("language") or language,
                "duration": result["duration_s"],
                "segments": [],
            }
        return JSONResponse(answer, headers=_where(result))

    async def draw(self, request: Request, body: ImageBody) -> Response:
        """POST /v1/images/generations."""
        _, result = await self._answer(request, body.model, ("image",), lambda _: body.job())
        return JSONResponse(
            {
                "created": int(time.time()),
                "data": [{"b64_json": _base64(image)} for image in result["images"]],
            },
            headers=_where(result),
        )

    # --- looks ----------------------------------------------------------------------------

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse(
            {"object": "list", "data": [self._card(model) for model in self._models.values()]}
        )

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        return JSONResponse(self._card(self._find(name)))

    async def healthz(self) -> Response:
        """The process lives; says nothing of models."""
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> Response:
        """200 when a request for whatever model would be answered; it may have to load it first."""
        states = {name: self._engine.status(name) for name in self._models}
        ready = all(self._engine.takes_requests(name) for name in self._models)
        return JSONResponse({"ready": ready, "models": states}, 200 if ready else 503)

    async def status(self) -> Response:
        """Everything the front knows, for people and umadctl."""
        return JSONResponse(self._look())

    async def metrics(self) -> Response:
        """The same for Prometheus, and the daemon's figures."""
        return Response(await self.counts.text(), media_type=MEDIA_TYPE)

    # --- inside ---------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        return {
            "engine": self._engine.describe(),
            "configuration": self.configuration,
            "models": {
                name: {
                    "kind": model.kind,
                    "quota": model.quota,
                    "ready": self._engine.takes_requests(name),
                    "requests": self.gate.places[name],
                    **self._engine.status(name),
                }
                for name, model in self._models.items()
            },
            "requests": {
                "in_work": self.gate.clients.total(),
                "body_bytes": self.gate.body_bytes,
                "client_gone": self.gate.client_gone,
                "refused": dict(self.gate.refused),
            },
        }

    def _find(self, name: str) -> ModelSettings:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(
                "no model of that name is configured; see /v1/models",
                details={"models": list(self._models)},
            )
        return model

    def _card(self, model: ModelSettings) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "umad",
            "kind": model.kind,
            **{
                key: value
                for key, value in self._engine.status(model.name).items()
                if key in ("state", "device", "device_quota")
            },
        }

    async def _answer(
        self,
        request: Request,
        name: str,
        kinds: tuple[str, ...],
        build: Callable[[str], Mapping[str, Any]],
    ) -> tuple[str, Mapping[str, Any]]:
        """Steps 3 to 5 of a request's way: (its id, the runner's result)."""
        began_s = time.monotonic()
        ident = f"{self._started_unix_s:x}-{next(self._numbers)}"
        code = "ok"
        try:
            model = self._find(name)
            request.scope[MODEL] = name
            if model.kind not in kinds:
                raise InvalidParams(
                    f"{name} is of kind {model.kind}; this route takes {' or '.join(kinds)}"
                )
            self._engine.check(name)
            job = build(model.kind)
            with self.gate.place(name):
                work = self._engine.run(name, job, request=ident, deadline_s=self._wait_max_s)
                return ident, await _unless_gone(request, work)
        except UmadError as error:
            code = error.code
            self.gate.refused[code] += 1
            raise
        except ClientGone:
            code = "client_gone"
            self.gate.client_gone += 1
            raise
        finally:
            log.info(
                "request.end",
                request=ident,
                model=name if name in self._models else "?",
                code=code,
                seconds=round(time.monotonic() - began_s, 4),
            )


async def _unless_gone(
    request: Request, work: Coroutine[Any, Any, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The result of ``work``, cancelled when the client hangs up first."""
    running = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({running, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGone
        return running.result()
    finally:
        for task in (running, hang_up):
            task.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _where(result: Mapping[str, Any]) -> dict[str, str]:
    """The header of an answer that was made on another device than the model's own."""
    return {"X-Umad-Device": result["device"]} if "device" in result else {}


def _choice(result: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": result["finish_reason"]}


def _usage(result: Mapping[str, Any]) -> dict[str, int]:
    prompt, completion = result["prompt_tokens"], result["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, UmadError)
    return refusal(error)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Place and reason only: pydantic's full text would repeat what the client wrote.
    found = [
        (
            ".".join(str(part) for part in problem["loc"][1:]),
            str(problem["msg"]).removeprefix("Value error, "),
        )
        for problem in error.errors()
    ]
    message = "; ".join(f"{place}: {why}" if place else why for place, why in found[:8])
    return error_response(400, message, InvalidParams.code, param=found[0][0] or None)


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(
        error.status_code, InvalidParams.code
    )
    return error_response(error.status_code, str(error.detail), code, headers=error.headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("request.bug", kind=type(error).__name__)
    return error_response(500, "an error inside umad; its log says more", "internal")
