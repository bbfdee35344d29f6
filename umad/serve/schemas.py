"""What a client may ask for: the OpenAI request bodies umad answers, and their way to a job.

Owns the bounds of every request field and the turn from a checked body into the plain map that
a model's runner takes (``job``).  Rules: an unknown field is ignored, as OpenAI's own servers do;
a known field that umad cannot honour is refused with its reason, never dropped in silence; no
message repeats what the client wrote.  Stays out: HTTP, models, limits of a queue.
"""

import base64
import binascii
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from umad.errors import InvalidParams

TOKENS_MAX: Final = 1 << 20
# Where a body names no max_tokens: memory is booked for the longest answer, so there is one.
CHAT_TOKENS: Final = 1024
COMPLETION_TOKENS: Final = 16  # as OpenAI's own
TEXTS_MAX: Final = 2048
SIDE_MIN, SIDE_MAX = 64, 16384  # what is too large for this machine, its memory says
IMAGE_SIZE: Final = "512x512"  # what latent diffusion models were trained for, most of them
IMAGE_STEPS: Final = 30
_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


class _Body(BaseModel):
    """Common to all bodies; ``strict`` so that true is no number and "5" is none either."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1, max_length=64)]
    stream: bool | None = False

    @field_validator("stream")
    @classmethod
    def _no_stream(cls, value: bool | None) -> bool | None:  # noqa: FBT001  pydantic's form
        if value:
            raise ValueError("streaming is not there yet; send stream=false")
        return value


class _Sampled(_Body):
    """The fields that steer text generation."""

    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = (
        Field(default=None, max_length=4)
    )
    n: Annotated[int, Field(ge=1)] | None = 1
    logprobs: bool | int | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("one choice per request; send n=1 and ask again for more")
        return value

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs(cls, value: bool | int | None) -> bool | int | None:  # noqa: FBT001
        if value:
            raise ValueError("log probabilities are not supported; leave logprobs out")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: object) -> object:
        # A text of more than 4 letters is one stop, not too many of them.
        return [value] if isinstance(value, str) else value

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        """The job's part that steers sampling; ``max_tokens`` where the body names none."""
        wanted = {
            "max_tokens": self.max_tokens or max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            # Any number names a seed; torch takes those from 0 on.
            "seed": None if self.seed is None else self.seed % 2**63,
            "stop": self.stop,
        }
        return {key: value for key, value in wanted.items() if value is not None}


class TextPart(BaseModel):
    """A piece of text in a message."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    """Where an image is: only inside the request itself."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    url: str

    @field_validator("url")
    @classmethod
    def _inside(cls, value: str) -> str:
        if not _DATA_URL.match(value):
            raise ValueError(
                "umad fetches nothing from the network: send the image itself as "
                '"data:image/png;base64,..."'
            )
        return value

    def decode(self) -> bytes:
        """The image file's bytes."""
        try:
            return base64.b64decode(self.url.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise InvalidParams("an image_url holds no valid base64") from error


class ImagePart(BaseModel):
    """An image in a message."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=256)]

    def parts(self) -> list[dict[str, Any]]:
        """The content as the vision kind takes it."""
        if isinstance(self.content, str):
            return [{"type": "text", "text": self.content}]
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image", "image": part.image_url.decode()}
            for part in self.content
        ]

    def text(self) -> str:
        """The content as the chat kind takes it.

        Raises:
            InvalidParams: it holds an image.
        """
        if isinstance(self.content, str):
            return self.content
        texts = [part.text for part in self.content if isinstance(part, TextPart)]
        if len(texts) != len(self.content):
            raise InvalidParams("this model reads text only; ask a model of kind vision")
        return "".join(texts)


class ChatBody(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.tools or self.functions:
            raise ValueError("tools are not supported; leave tools and functions out")
        if self.response_format and self.response_format.get("type") != "text":
            raise ValueError('only response_format {"type": "text"} is supported')
        return self

    def job(self, kind: str) -> dict[str, Any]:
        """The plain map for a runner of this kind ("chat" or "vision")."""
        messages = [
            {
                # "developer" is the newer name of the same role; chat templates know "system".
                "role": "system" if message.role == "developer" else message.role,
                "content": message.parts() if kind == "vision" else message.text(),
            }
            for message in self.messages
        ]
        # The newer name of max_tokens.
        most = self.max_completion_tokens or CHAT_TOKENS
        return {"messages": messages, **self._sampling(most)}


class CompletionBody(_Sampled):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)]
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = 1

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: object) -> object:
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return value[0]
            raise ValueError("one prompt per request, as text; send several requests")
        return value

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.echo or self.suffix or self.best_of not in (None, 1):
            raise ValueError("echo, suffix and best_of are not supported; leave them out")
        return self

    def job(self, kind: str) -> dict[str, Any]:
        """The plain map for a runner of kind "chat" or "vision"."""
        return {"prompt": self.prompt, **self._sampling(COMPLETION_TOKENS)}


class EmbeddingBody(_Body):
    """POST /v1/embeddings."""

    input: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=TEXTS_MAX)
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value and not isinstance(value[0], str):
            raise ValueError("input is text or a list of texts; token numbers are not taken")
        return value

    @field_validator("dimensions")
    @classmethod
    def _whole_vectors(cls, value: int | None) -> int | None:
        if value is not None:
            raise ValueError("vectors come at the model's own size; leave dimensions out")
        return value

    def job(self) -> dict[str, Any]:
        """The plain map for a runner of kind "embedding"."""
        return {"texts": self.input}


class ImageBody(_Body):
    """POST /v1/images/generations; ``steps`` and ``seed`` are additions of umad."""

    prompt: Annotated[str, Field(min_length=1, max_length=32_000)]
    n: Annotated[int, Field(ge=1, le=4)] | None = 1
    size: str | None = None
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    response_format: Literal["b64_json", "url"] | None = "b64_json"

    @field_validator("size")
    @classmethod
    def _sides(cls, value: str | None) -> str | None:
        if value is None or value == "auto":
            return None
        sides = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", value)
        if sides is None:
            raise ValueError('size is WIDTHxHEIGHT, like "512x512"')
        if not all(SIDE_MIN <= int(side) <= SIDE_MAX for side in sides.groups()):
            raise ValueError(f"each side has from {SIDE_MIN} to {SIDE_MAX} pixels")
        return value

    @field_validator("response_format")
    @classmethod
    def _inline(cls, value: str | None) -> str | None:
        if value == "url":
            raise ValueError("umad keeps no images to link to; send response_format=b64_json")
        return value

    def job(self) -> dict[str, Any]:
        """The plain map for a runner of kind "image"."""
        width, _, height = (self.size or IMAGE_SIZE).partition("x")
        return {
            "prompt": self.prompt,
            "n": self.n or 1,
            "width": int(width),
            "height": int(height),
            "steps": self.steps or IMAGE_STEPS,
            "seed": self.seed,
        }
