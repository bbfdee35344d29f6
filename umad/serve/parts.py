"""The messages of a conversation: text, and images that are inside the request itself.

Owns the turn from a message's parts into what the runners of kind "chat" and "vision" take.
"""

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from umad.errors import InvalidParams
from umad.serve.bodies import decode_base64

_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


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
            return decode_base64(self.url.partition(",")[2])
        except ValueError as error:
            raise InvalidParams(
                "an image_url holds no valid base64", details={"param": "messages"}
            ) from error


class Part(BaseModel):
    """A piece of a message; no union, whose branches' names would be in each error."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _holds_it(self) -> Self:
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type} has a field {self.type}")
        return self


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], Field(min_length=1, max_length=256, fail_fast=True)]

    @field_validator("content", mode="before")
    @classmethod
    def _in_parts(cls, value: object) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ValueError("content is text or a list of parts")
        return value

    def parts(self) -> list[dict[str, Any]]:
        """The content as the vision kind takes it."""
        return [
            {"type": "image", "image": part.image_url.decode()}
            if part.type == "image_url" and part.image_url is not None
            else {"type": "text", "text": part.text}
            for part in self.content
        ]

    def text(self) -> str:
        """The content as the chat kind takes it.

        Raises:
            InvalidParams: it holds an image.
        """
        if any(part.type != "text" for part in self.content):
            raise InvalidParams(
                "this model reads text only; ask a model of kind vision",
                details={"param": "messages"},
            )
        return "".join(part.text or "" for part in self.content)
