"""One real request to each of the five models over HTTP, with nothing but the standard library."""

import io
import json
import math
import struct
import uuid
import wave
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

REQUEST_WITHIN_S: Final = 60.0


@dataclass(frozen=True)
class Answer:
    """What came back; status 0 when nothing did."""

    status: int
    body: dict[str, Any]
    retry_after: str | None = None


def get(address: str, path: str) -> Answer:
    return _send(address, "GET", path, b"", "")


def chat(address: str, model: str, content: Any, max_tokens: int = 16) -> Answer:
    return post(
        address,
        "/v1/chat/completions",
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
    )


def look(address: str, model: str) -> Answer:
    url = "data:image/png;base64," + b64encode(picture(64, 64)).decode()
    return chat(
        address,
        model,
        [
            {"type": "text", "text": "What is in this picture?"},
            {"type": "image_url", "image_url": {"url": url}},
        ],
    )


def paint(address: str, model: str, size: str = "64x64") -> Answer:
    return post(
        address,
        "/v1/images/generations",
        model=model,
        prompt="a lighthouse at night",
        size=size,
        response_format="b64_json",
    )


def listen(address: str, model: str) -> Answer:
    boundary = uuid.uuid4().hex
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    ).encode()
    body += tone(1.0) + f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return _send(address, "POST", "/v1/audio/transcriptions", body, kind)


def gist(answer: Answer) -> str:
    """The heart of an answer, in one short line."""
    body = answer.body
    if "error" in body:
        return f"HTTP {answer.status}: {body['error']['message']}"
    if "choices" in body:
        text = json.dumps(body["choices"][0]["message"]["content"], ensure_ascii=False)
        cut = text if len(text) <= 44 else text[:44] + "..."
        return f"{cut} ({body['usage']['completion_tokens']} tokens)"
    if "data" in body:
        size = len(body["data"][0]["b64_json"]) * 3 // 4
        return f"a PNG of {size:,} bytes"
    return json.dumps(body.get("text", body), ensure_ascii=False)[:60]


FIVE: Final[dict[str, Callable[[str, str], Answer]]] = {
    "llama": lambda address, model: chat(address, model, "Tell me about the harbour."),
    "qwen": lambda address, model: chat(address, model, "What does a ledger do?"),
    "vision": look,
    "sdxl": paint,
    "whisper": listen,
}


def post(address: str, path: str, **body: Any) -> Answer:
    return _send(address, "POST", path, json.dumps(body).encode(), "application/json")


def picture(width: int, height: int) -> bytes:
    """A PNG of a red square on white."""
    rows = b"".join(
        b"\0"
        + b"".join(
            b"\xc0\x20\x20" if abs(x - width / 2) < 16 and abs(y - height / 2) < 16 else b"\xff" * 3
            for x in range(width)
        )
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def tone(seconds: float, rate: int = 16000) -> bytes:
    """A WAV of a 440 Hz tone."""
    samples = (
        int(9000 * math.sin(2 * math.pi * 440 * index / rate))
        for index in range(int(seconds * rate))
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


def _send(address: str, method: str, path: str, body: bytes, kind: str) -> Answer:
    connection = HTTPConnection(address, timeout=REQUEST_WITHIN_S)
    try:
        connection.request(method, path, body or None, {"Content-Type": kind} if kind else {})
        response = connection.getresponse()
        return Answer(
            response.status, json.loads(response.read()), response.headers.get("Retry-After")
        )
    except (OSError, HTTPException, ValueError) as error:
        return Answer(0, {"error": {"message": f"{type(error).__name__}: {error}"}})
    finally:
        connection.close()
