"""The messages of a conversation: text, and images that are inside the request itself.

Owns the turn from a message's parts into what the runners of kind "chat" and "vision" take.
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, field_validator

from umad.errors import InvalidParams
from umad.serve.bodies import decode_base64

_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


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
            return decode_base64(self.url.partition(",")[2])
        except ValueError as error:
            raise InvalidParams(
                "an image_url holds no valid base64", details={"param": "messages"}
            ) from error


class ImagePart(BaseModel):
    """An image in a message."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    TextPart | ImagePart,
    Discriminator(
        "type",
        custom_error_type="part",
        custom_error_message="a part of a message is of type text or image_url",
    ),
]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=256, fail_fast=True)]

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
            raise InvalidParams(
                "this model reads text only; ask a model of kind vision",
                details={"param": "messages"},
            )
        return "".join(texts)
