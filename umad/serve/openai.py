"""The routes that answer with a model's work, as OpenAI's client asks for it.

Owns which route takes which kinds of models and the form of its answers.  A request's way:
1. gate: its turn, the share of its client, the size of its body (before it is read)
2. body -> schema
3. the model exists, is of the right kind, is ready or is loaded for it
4. schema -> jobs, places in the model's queue
5. the engine's answer, or the client's hang-up
"""

import base64
import time
from collections.abc import Sequence
from typing import Final

import orjson
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from umad.errors import InvalidParams
from umad.serve.asking import Asking, Result
from umad.serve.bodies import Body, check_form, encode_base64, off_loop, parse
from umad.serve.link import unpack_vector
from umad.serve.schemas import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    ImageBody,
    TranscriptionForm,
)
from umad.serve.spans import span_of
from umad.serve.streaming import CHAT, COMPLETION, EventStream, Form, events, whole

_TEXT_KINDS: Final = ("chat", "vision")
_FIELDS_MAX: Final = 32


class Routes:
    """The endpoints."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body, size = await _read(request, ChatBody)
        return await self._text(request, body, size, CHAT)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body, size = await _read(request, CompletionBody)
        return await self._text(request, body, size, COMPLETION)

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body, _ = await _read(request, EmbeddingBody)
        kind = self._asking.ready(request, body.model, ("embedding",))
        (result,) = await self._asking.results(request, body.model, body.jobs(kind))
        size = sum(map(len, result["vectors"]))
        in_base64 = body.encoding_format == "base64"
        content = await off_loop(4 * size, _vectors, body.model, result, in_base64=in_base64)
        return Response(content, headers=_where(request), media_type="application/json")

    async def transcribe(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions."""
        async with request.form(max_files=1, max_fields=_FIELDS_MAX) as sent:
            file = sent.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidParams("file: the sound is missing", details={"param": "file"})
            form = check_form(TranscriptionForm, sent)
            self._asking.ready(request, form.model, ("speech",))
            audio = await file.read()
        (result,) = await self._asking.results(request, form.model, form.jobs(audio))
        if form.response_format == "text":
            return PlainTextResponse(result["text"] + "\n", headers=_where(request))
        if form.response_format == "json":
            return JSONResponse({"text": result["text"]}, headers=_where(request))
        content = await off_loop(len(result["segments"]), _transcription, result)
        return Response(content, headers=_where(request), media_type="application/json")

    async def draw(self, request: Request) -> Response:
        """POST /v1/images/generations."""
        body, _ = await _read(request, ImageBody)
        kind = self._asking.ready(request, body.model, ("image",))
        (result,) = await self._asking.results(request, body.model, body.jobs(kind))
        content = await off_loop(sum(map(len, result["images"])), _images, result["images"])
        return Response(content, headers=_where(request), media_type="application/json")

    async def _text(
        self, request: Request, body: ChatBody | CompletionBody, size: int, form: Form
    ) -> Response:
        """An answer in text, at once or as it is made."""
        kind = self._asking.ready(request, body.model, _TEXT_KINDS)
        # An image in it is decoded, which takes longer than anything else here.
        jobs = await off_loop(size, body.jobs, kind)
        span = span_of(request.scope)
        if body.stream:
            asking = self._asking.ask(request, body.model, jobs, stream=True)
            made = events(asking, form, span, with_usage=body.wants_usage)
            first = await anext(made)  # by then it is known where it is made
            return EventStream(first, made, _where(request))
        results = await self._asking.results(request, body.model, jobs)
        answer = whole(form, span.ident, body.model, results)
        return JSONResponse(answer, headers=_where(request))


async def _read(request: Request, kind: type[Body]) -> tuple[Body, int]:
    """A request's body, checked, and its size in bytes."""
    data = await request.body()
    return await off_loop(len(data), parse, kind, data), len(data)


def _vectors(model: str, result: Result, *, in_base64: bool) -> bytes:
    """The answer with a model's vectors.

    One call for each vector: a library that writes a million numbers in one keeps the
    interpreter's lock until it is done.
    """

    def written(vector: bytes) -> bytes:
        if in_base64:
            return b'"' + base64.b64encode(vector) + b'"'
        return orjson.dumps(unpack_vector(vector))

    rows = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, written(vector))
        for index, vector in enumerate(result["vectors"])
    )
    tokens = result["tokens"]
    rest = orjson.dumps(
        {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )
    return b'{"object":"list","data":[%b],%b' % (rows, rest[1:])


def _images(images: Sequence[bytes]) -> bytes:
    """The answer with a model's images; written here, because base64 needs no escaping."""
    shown = b",".join(b'{"b64_json":"%b"}' % encode_base64(image) for image in images)
    return b'{"created":%d,"data":[%b]}' % (int(time.time()), shown)


def _transcription(result: Result) -> bytes:
    """The whole answer with what a file says; its segments are JSON already."""
    shown = {
        "task": "transcribe",
        "language": result.get("language"),
        "duration": result["duration_s"],
        "text": result["text"],
    }
    return b'%b,"segments":%b}' % (orjson.dumps(shown)[:-1], result["segments"])


def _where(request: Request) -> dict[str, str]:
    """The header of an answer that was made on another device than the model's own."""
    device = span_of(request.scope).device
    return {} if device is None else {"X-Umad-Device": device}
