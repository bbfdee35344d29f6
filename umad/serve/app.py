"""The HTTP front: its routes, its looks, and the form of what goes wrong.

Rules: it holds no model and imports no torch; a refusal is never a 500; a client that hangs up
cancels its work; no log line holds what a client wrote.  A request's way is told in ``openai``.
"""

import time
from typing import Any, Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from umad.config import ModelSettings, Settings
from umad.errors import InvalidParams, UmadError
from umad.serve.asking import Asking, ClientGone
from umad.serve.gate import Gate, GateMiddleware, error_body, refusal, requests_max
from umad.serve.link import EngineLink
from umad.serve.metrics import MEDIA_TYPE, FrontMetrics, MetricsMiddleware
from umad.serve.openai import Routes
from umad.serve.page import StatusPage
from umad.serve.spans import span_of

PING_S: Final = 1.0  # an engine that is busy answers within milliseconds
log = structlog.get_logger()


def create_app(settings: Settings, engine: EngineLink) -> Starlette:
    """The application of one front, which is its ``state.front``.

    Args:
        settings: the whole configuration; the models and [serve] count here.
        engine: the link to the inference process, which may come and go.
    """
    front = Front(settings, engine)
    answers = Routes(front.asking)
    routes = [
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.complete, methods=["POST"]),
        Route("/v1/embeddings", answers.embed, methods=["POST"]),
        Route("/v1/audio/transcriptions", answers.transcribe, methods=["POST"]),
        Route("/v1/images/generations", answers.draw, methods=["POST"]),
        Route("/v1/models", front.models),
        Route("/v1/models/{name}", front.model),
        Route("/healthz", front.healthz),
        Route("/readyz", front.readyz),
        Route("/status", front.status),
        Route("/metrics", front.metrics),
        Route("/", front.page.show),
        Route("/page/{name}", front.page.part),
    ]
    known = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(MetricsMiddleware, metrics=front.counts, routes=known),
            Middleware(GateMiddleware, gate=front.gate),
        ],
        exception_handlers={
            UmadError: _on_refusal,
            HTTPException: _on_http,
            ClientGone: _on_gone,
            Exception: _on_bug,
        },
    )
    app.state.front = front
    return app


class Front:
    """What the routes share, and the looks at it.

    Attributes:
        page: the status page, at ``/``.
        configuration: of which moment it is, and what is wrong with a newer one, for /status.
    """

    def __init__(self, settings: Settings, engine: EngineLink) -> None:
        self._engine = engine
        self._started_unix_s = int(time.time())
        self.gate = Gate(settings.serve)
        self.asking = Asking(engine, self.gate)
        self.counts = FrontMetrics(settings.daemon.socket, self._look)
        self.page = StatusPage(settings.daemon.socket, self._look)
        self.configuration: dict[str, Any] = {"read_unix_s": self._started_unix_s, "problem": ""}
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Serve by these settings from now on."""
        self._serve = settings.serve
        self.asking.follow(settings)
        self.gate.follow(settings.serve)

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        cards = [self._card(model) for model in self.asking.models.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        return JSONResponse(self._card(self.asking.find(request.path_params["name"])))

    async def healthz(self, _: Request) -> Response:
        """The process lives; says nothing of models."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        """200 when a request for whatever model would be answered; it may have to load it first."""
        names = self.asking.models
        answers = await self._engine.answers(PING_S)
        ready = answers and all(self._engine.takes_requests(name) for name in names)
        states = {name: self._engine.status(name) for name in names}
        body = {"ready": ready, "engine_answers": answers, "models": states}
        return JSONResponse(body, 200 if ready else 503)

    async def status(self, _: Request) -> Response:
        """Everything the front knows, for people and umadctl."""
        return JSONResponse(self._look())

    async def metrics(self, _: Request) -> Response:
        """The same for Prometheus, and the daemon's figures."""
        return Response(await self.counts.text(), media_type=MEDIA_TYPE)

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
                for name, model in self.asking.models.items()
            },
            "requests": {
                "in_work": self.gate.clients.total() - self.gate.waiting,
                "waiting": self.gate.waiting,
                "limit": requests_max(self._serve),
                "body_bytes": self.gate.body_bytes,
                "client_gone": self.counts.client_gone,
                "refused": dict(self.counts.refused),
            },
        }

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


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, UmadError)
    span_of(request.scope).fail(error)
    return refusal(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(
        error.status_code, InvalidParams.code
    )
    span_of(request.scope).code = code
    body = error_body(error.status_code, str(error.detail), code)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("request.bug", kind=type(error).__name__)
    return JSONResponse(error_body(500, "an error inside umad; its log says more", "internal"), 500)
