"""Text answers in OpenAI's form, whole and as server-sent events while they are made.

Rules: nothing is sent before the first piece or the result is there, so that a refusal has its own
status; a refusal after that is an event, and the stream ends without ``[DONE]``; a result ends its
choice, and what of its text was not sent in pieces is sent then.
"""

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from umad.errors import UmadError
from umad.serve.asking import Asked, ClientGone, Result
from umad.serve.gate import refusal_body
from umad.serve.spans import Span

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Form:
    """What the answers of a route look like.

    ``prefix`` is that of their ids, ``whole_type`` and ``piece_type`` are their ``object``;
    ``opening`` and ``closing`` are a choice's first and last piece, ``whole`` and ``piece`` make
    its content from text.
    """

    prefix: str
    whole_type: str
    piece_type: str
    opening: Mapping[str, Any] | None
    closing: Mapping[str, Any]
    whole: Callable[[str], Mapping[str, Any]]
    piece: Callable[[str], Mapping[str, Any]]


CHAT: Final = Form(
    prefix="chatcmpl-",
    whole_type="chat.completion",
    piece_type="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    piece=lambda text: {"delta": {"content": text}},
)
COMPLETION: Final = Form(
    prefix="cmpl-",
    whole_type="text_completion",
    piece_type="text_completion",
    opening=None,
    closing={"text": ""},
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
)


def whole(form: Form, ident: str, model: str, results: Sequence[Result]) -> dict[str, Any]:
    """An answer that is sent at once."""
    return {
        **_head(form.prefix + ident, form.whole_type, model),
        "choices": [
            _choice(index, form.whole(result["text"]), result["finish_reason"])
            for index, result in enumerate(results)
        ],
        "usage": _usage(results),
    }


async def events(
    asking: AbstractContextManager[Asked],
    form: Form,
    span: Span,
    *,
    with_usage: bool,
) -> AsyncGenerator[bytes]:
    """The pieces of an answer as events.

    Args:
        asking: the jobs, as ``Asking.ask`` gives them; asked and ended in here.
        form: of the route.
        span: of the request.
        with_usage: whether the last event is what was used.

    Raises:
        UmadError: a refusal before the first event; later ones are events.
        ClientGone: likewise; later it ends the stream.
    """
    head = _head(form.prefix + span.ident, form.piece_type, span.model)
    if with_usage:
        head["usage"] = None
    sent: dict[int, int] = {}  # characters, by choice
    results: list[Result] = []
    try:
        with asking as asked:
            async for index, news in asked:
                pieces = _pieces(form, news, sent.get(index))
                yield b"".join(
                    _event({**head, "choices": [_choice(index, *piece)]}) for piece in pieces
                )
                if isinstance(news, str):
                    sent[index] = sent.get(index, 0) + len(news)
                else:
                    results.append(news)
                    sent[index] = len(news["text"])
    except UmadError as error:
        if not sent:
            raise
        span.fail(error)
        yield _event(refusal_body(error))
        return
    except ClientGone:
        if not sent:
            raise
        return
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(results)})
    yield DONE


class EventStream(StreamingResponse):
    """Sends events; the client's hang-up is the business of who makes them."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], headers: Mapping[str, str]
    ) -> None:
        async def made() -> AsyncGenerator[bytes]:
            yield first
            async for event in rest:
                yield event

        self._rest = rest
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(made(), headers={**own, **headers}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server."""
        try:
            await self.stream_response(send)
        finally:
            await self._rest.aclose()  # now, not when it is collected


def _pieces(
    form: Form, news: str | Result, sent: int | None
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """What a choice has grown by; ``sent`` is None before its first piece."""
    if sent is None and form.opening is not None:
        yield form.opening, None
    text = news if isinstance(news, str) else news["text"][sent or 0 :]
    if text:
        yield form.piece(text), None
    if not isinstance(news, str):
        yield form.closing, news["finish_reason"]


def _head(ident: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": ident, "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    """A prompt counts once, however many answers it has; what one of them had to read was read."""
    prompt = max(result["prompt_tokens"] for result in results)
    cached = min(result.get("cached_tokens", 0) for result in results)
    completion = sum(result["completion_tokens"] for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
