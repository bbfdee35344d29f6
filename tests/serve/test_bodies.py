"""Bodies: large ones are worked on in pieces, and what a client wrote is never repeated."""

import asyncio
import base64
import random
import threading

import pytest

from tests.serve.standin import run
from umad.errors import InvalidParams
from umad.serve.bodies import (
    _PIECE,
    ELEMENTS_MAX,
    LARGE_BYTES,
    decode_base64,
    encode_base64,
    off_loop,
    parse,
)
from umad.serve.schemas import _REFUSED, ChatBody, CompletionBody, EmbeddingBody, ImageBody

CHAT = '{"model": "m", "messages": [{"role": "user", "content": "secret"}]%s}'
COMPLETION = '{"model": "m", "prompt": "secret"%s}'
IMAGE = '{"model": "m", "prompt": "secret"%s}'


@pytest.mark.parametrize("size", [0, 1, 2, 3, _PIECE - 1, _PIECE, _PIECE + 1, 2 * _PIECE + 5])
def test_base64_in_pieces_is_base64(size):
    data = random.randbytes(size)
    assert encode_base64(data) == base64.b64encode(data)
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("wrong", ["A", "AA=A", "A===", "AAA\n", "☺☺☺☺", "AA==" * _PIECE])
def test_what_is_no_base64_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        decode_base64(wrong)


def test_what_is_large_is_done_in_a_thread():
    async def scenario():
        assert await off_loop(LARGE_BYTES, threading.current_thread) is threading.main_thread()
        elsewhere = await off_loop(LARGE_BYTES + 1, threading.current_thread)
        assert elsewhere is not threading.main_thread()
        await asyncio.get_running_loop().shutdown_default_executor()

    run(scenario())


def test_a_long_text_has_few_elements_and_many_elements_are_refused_unread():
    text = r"a, [b], {\"c\": \\ }, " * ELEMENTS_MAX
    body = parse(EmbeddingBody, b'{"model": "m", "input": "%b"}' % text.encode())
    assert len(body.input[0]) > 10 * ELEMENTS_MAX
    many = b",".join([b"[]"] * ELEMENTS_MAX)
    with pytest.raises(InvalidParams, match="more than 65536 elements"):
        parse(EmbeddingBody, b'{"model": "m", "input": "a", "ignored": [%b]}' % many)


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        ("null", "content", "content is text or a list of parts"),
        ('{"secret": 1}', "content", "content is text or a list of parts"),
        ("[]", "content", "at least 1 item"),
        ('["secret"]', "content.0", "a valid dictionary|an object"),
        ('[{"type": "secret"}]', "content.0.type", "'text' or 'image_url'"),
        ('[{"text": "secret"}]', "content.0.type", "Field required"),
        ('[{"type": "text", "text": 5}]', "content.0.text", "valid string"),
        ('[{"type": "text"}]', "content.0", "a part of type text has a field text"),
        ('[{"type": "image_url", "text": "secret"}]', "content.0", "has a field image_url"),
        ('[{"type": "image_url", "image_url": {}}]', "content.0.image_url.url", "required"),
    ],
)
def test_what_is_wrong_in_a_message_is_said_once_where_it_is(content, param, says):
    text = CHAT.replace('"secret"', content) % ""
    with pytest.raises(InvalidParams, match=says) as caught:
        parse(ChatBody, text.encode())
    assert caught.value.details["param"] == f"messages.0.{param}"
    assert caught.value.message.count("messages.0") == 1
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_a_field_that_cannot_be_honoured_is_refused_by_name_and_harmless_when_it_asks_nothing(name):
    bodies = ((ChatBody, CHAT), (CompletionBody, COMPLETION), (ImageBody, IMAGE))
    known = [(kind, text) for kind, text in bodies if name in kind.model_fields]
    assert known or name in EmbeddingBody.model_fields
    for kind, text in known:
        for asked in ('"secret"', '["secret"]', '{"secret": 1}', "7"):
            with pytest.raises(InvalidParams) as caught:
                parse(kind, (text % f', "{name}": {asked}').encode())
            assert caught.value.details["param"] == name
            assert caught.value.message.startswith(f"{name}: ")
            assert caught.value.message.endswith("; leave it out")
            assert "secret" not in caught.value.message
        for asked in ("null", "[]", "{}", '""', "0", "false"):
            parse(kind, (text % f', "{name}": {asked}').encode())
