"""What a client may ask for: the OpenAI request bodies umad answers, and their way to a job.

Owns the bounds of every request field and the turn from a checked body into the plain maps that
a model's runner takes (``jobs``).  Rules: an unknown field is ignored, as OpenAI's own servers do;
a known field that umad cannot honour is refused with its reason, never dropped in silence, but for
those that change no answer (``user``, ``metadata``, ``store``, ``service_tier``, ...); no message
repeats what the client wrote.  Stays out: HTTP, models, limits of a queue.
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from umad.serve.parts import Message

TOKENS_MAX: Final = 1 << 20
# Where a body names no max_tokens: memory is booked for the longest answer, so there is one.
CHAT_TOKENS: Final = 1024
COMPLETION_TOKENS: Final = 16  # as OpenAI's own
TEXTS_MAX: Final = 2048
CHOICES_MAX: Final = 8
SIDE_MIN, SIDE_MAX = 64, 16384  # what is too large for this machine, its memory says
IMAGE_SIZE: Final = "512x512"  # what latent diffusion models were trained for, most of them
IMAGE_STEPS: Final = 30


# Fields that would change an answer and that umad cannot honour: the values that ask for nothing
# beside those that are empty, and the reason.
_REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "audio": ((), "answers are text"),
    "background": (("auto", "opaque"), "images are opaque"),
    "best_of": ((1,), "every answer is one of its own; use n"),
    "dimensions": ((), "vectors come at the model's own size"),
    "echo": ((), "the prompt is not repeated"),
    "frequency_penalty": ((), "penalties are not supported"),
    "function_call": (("none", "auto"), "functions are not supported"),
    "functions": ((), "not supported"),
    "logit_bias": ((), "a bias on tokens is not supported"),
    "modalities": ((["text"],), "answers are text"),
    "output_compression": ((100,), "images are PNG"),
    "output_format": (("png",), "images are PNG"),
    "partial_images": ((), "images come whole"),
    "presence_penalty": ((), "penalties are not supported"),
    "quality": (("auto", "standard"), "an image's quality is its number of steps"),
    "reasoning_effort": (("none",), "a model thinks as its template says"),
    "style": ((), "the prompt alone says the style"),
    "suffix": ((), "text is continued, not filled in"),
    "tool_choice": (("none", "auto"), "tools are not supported"),
    "tools": ((), "not supported"),
    "top_logprobs": ((), "log probabilities are not supported"),
    "verbosity": (("medium",), "a model says as much as it wants"),
    "web_search_options": ((), "umad asks nothing of the network"),
}


class _Body(BaseModel):
    """Common to all bodies; ``strict`` so that true is no number and "5" is none either."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1, max_length=64)]

    @field_validator(*_REFUSED, mode="before", check_fields=False)
    @classmethod
    def _not_here(cls, value: object, info: ValidationInfo) -> object:
        harmless, why = _REFUSED[str(info.field_name)]
        if value and value not in harmless:
            raise ValueError(f"{why}; leave it out")
        return value


class StreamOptions(BaseModel):
    """What a stream holds beside the answer."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    include_usage: bool | None = False


class _Sampled(_Body):
    """The fields that steer text generation."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = (
        Field(default=None, max_length=4)
    )
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = 1
    logprobs: bool | int | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs(cls, value: bool | int | None) -> bool | int | None:  # noqa: FBT001
        # Of a completion, 0 asks for those of the chosen tokens.
        if value is not None and value is not False:
            raise ValueError("log probabilities are not supported; leave it out")
        return value

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only a stream has options; send stream=true or leave them out")
        return value

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: object) -> object:
        # A text of more than 4 letters is one stop, not too many of them.
        return [value] if isinstance(value, str) else value

    def _jobs(self, asked: dict[str, Any], max_tokens: int) -> list[dict[str, Any]]:
        """A job for each choice; ``max_tokens`` where the body names none."""
        wanted = {
            "max_tokens": self.max_tokens or max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop,
        }
        job = asked | {key: value for key, value in wanted.items() if value is not None}
        if self.seed is None:
            return [job] * (self.n or 1)
        # Any number names a seed; torch takes those from 0 on.
        return [job | {"seed": (self.seed + choice) % 2**63} for choice in range(self.n or 1)]


class ChatBody(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @field_validator("response_format")
    @classmethod
    def _free_text(cls, value: Any) -> Any:
        if value and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported')
        return value

    def jobs(self, kind: str) -> list[dict[str, Any]]:
        """The plain maps for a runner of this kind ("chat" or "vision"), one for each choice."""
        messages = [
            {
                # "developer" is the newer name of the same role; chat templates know "system".
                "role": "system" if message.role == "developer" else message.role,
                "content": message.parts() if kind == "vision" else message.text(),
            }
            for message in self.messages
        ]
        # The newer name of max_tokens.
        return self._jobs({"messages": messages}, self.max_completion_tokens or CHAT_TOKENS)


class CompletionBody(_Sampled):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)]
    echo: Any = None
    suffix: Any = None
    best_of: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: object) -> object:
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return value[0]
            raise ValueError("one prompt per request, as text; send several requests")
        return value

    def jobs(self, _kind: str) -> list[dict[str, Any]]:
        """The plain maps for a runner of kind "chat" or "vision", one for each choice."""
        return self._jobs({"prompt": self.prompt}, COMPLETION_TOKENS)


class EmbeddingBody(_Body):
    """POST /v1/embeddings."""

    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(min_length=1, max_length=TEXTS_MAX, fail_fast=True),
    ]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value and not isinstance(value[0], str):
            raise ValueError("write a text or a list of texts; token numbers are not taken")
        return value

    def jobs(self, _kind: str) -> list[dict[str, Any]]:
        """The plain map for a runner of kind "embedding"."""
        return [{"texts": self.input}]


class ImageBody(_Body):
    """POST /v1/images/generations; ``steps`` and ``seed`` are additions of umad."""

    prompt: Annotated[str, Field(min_length=1, max_length=32_000)]
    n: Annotated[int, Field(ge=1, le=4)] | None = 1
    size: str | None = None
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    response_format: Literal["b64_json", "url"] | None = "b64_json"
    stream: bool | None = False
    background: Any = None
    output_compression: Any = None
    output_format: Any = None
    partial_images: Any = None
    quality: Any = None
    style: Any = None

    @field_validator("stream")
    @classmethod
    def _whole(cls, value: bool | None) -> bool | None:  # noqa: FBT001  pydantic's form
        if value:
            raise ValueError("images come whole; leave it out")
        return value

    @field_validator("size")
    @classmethod
    def _sides(cls, value: str | None) -> str | None:
        if value is None or value == "auto":
            return None
        sides = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", value)
        if sides is None:
            raise ValueError('write WIDTHxHEIGHT, like "512x512"')
        if not all(SIDE_MIN <= int(side) <= SIDE_MAX for side in sides.groups()):
            raise ValueError(f"each side has from {SIDE_MIN} to {SIDE_MAX} pixels")
        return value

    @field_validator("response_format")
    @classmethod
    def _inline(cls, value: str | None) -> str | None:
        if value == "url":
            raise ValueError("umad keeps no images to link to; send b64_json")
        return value

    def jobs(self, _kind: str) -> list[dict[str, Any]]:
        """The plain map for a runner of kind "image"."""
        width, _, height = (self.size or IMAGE_SIZE).partition("x")
        return [
            {
                "prompt": self.prompt,
                "n": self.n or 1,
                "width": int(width),
                "height": int(height),
                "steps": self.steps or IMAGE_STEPS,
                "seed": self.seed,
            }
        ]


class TranscriptionForm(_Body):
    """The fields of POST /v1/audio/transcriptions beside its file."""

    language: Annotated[str, Field(max_length=32)] | None = None
    response_format: str = "json"
    temperature: str | None = None
    prompt: str | None = None
    stream: str | None = None
    timestamp_granularities: str | None = Field(default=None, alias="timestamp_granularities[]")
    include: str | None = Field(default=None, alias="include[]")

    @field_validator("response_format")
    @classmethod
    def _form(cls, value: str) -> str:
        if value not in ("json", "text", "verbose_json"):
            raise ValueError("send json, text or verbose_json")
        return value

    @field_validator("temperature")
    @classmethod
    def _likeliest(cls, value: str | None) -> str | None:
        if value is not None and value.strip("0.") != "":
            raise ValueError("what is said is the likeliest text; send 0")
        return value

    @field_validator("prompt", "stream", "timestamp_granularities", "include")
    @classmethod
    def _without(cls, value: str | None) -> str | None:
        if value and value.lower() not in ("false", "0", "segment"):
            raise ValueError("not supported; leave it out")
        return value

    def jobs(self, audio: bytes) -> list[dict[str, Any]]:
        """The plain map for a runner of kind "speech"."""
        segments = self.response_format == "verbose_json"
        return [{"audio": audio, "language": self.language, "segments": segments}]
