"""Kind "vision": a language model that also reads images.

Job and result: as kind "chat"; a message's content may be a list of ``{"type": "text", "text"}``
and ``{"type": "image", "image": bytes}`` (PNG, JPEG, WebP).
"""

import io
import math
from typing import TYPE_CHECKING, Any, Final

from umad.errors import InvalidParams
from umad.serve.kinds.base import Job, Source, fused, read
from umad.serve.kinds.text import TextRunner, messages_of, parts_of, text_bytes

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP")
PIXELS_MAX: Final = 40_000_000
"""Of an image as it is sent, and as its model scales it."""
ASPECT_MAX: Final = 100  # a side over the other; one of 1 x 60000 would be scaled to millions
IMAGES_MAX: Final = 16
# Decoded RGB, its conversion, the processor's array and one in float32, before or after the resize.
PIXEL_BYTES: Final = 3 + 3 + 3 + 12
PATCH_SIDE: Final = 14  # of a tower that does not say; the common size


class VisionRunner(TextRunner):
    """A vision-language model and its processor."""

    kind = "vision"

    def __init__(self, model: Any, processor: Any, resident_bytes: int) -> None:
        super().__init__(model, processor.tokenizer, resident_bytes)
        self._processor = processor
        self._template = processor
        side = getattr(model.config.vision_config, "patch_size", PATCH_SIDE)
        self._patch_pixels = side**2 if isinstance(side, int) else PATCH_SIDE**2

    @classmethod
    def load(cls, source: Source, resident: Any) -> "VisionRunner":
        """Read it from its folder."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        # PIL's processors exist for every family; torchvision's need a package more.
        processor = AutoProcessor.from_pretrained(source.path, local_files_only=True, backend="pil")
        model = read(AutoModelForImageTextToText, source)
        return cls(model, processor, resident(model))

    def bytes_needed(self, job: Job) -> int:
        """As a text model's, each image being tokens too, and the vision tower's activations.

        Source: the tensors of transformers' vision layers: for each patch residual, normed copy,
        queries, keys, values and output, and two of the inner size; then the pixels themselves.
        """
        sizes = self._sizes(job)
        tower = self._model.config.vision_config
        tokens, extra = 0, 0
        for width, height in sizes:
            new, patches = self._counts(width, height)
            tokens += new
            hidden = tower.hidden_size
            inner = getattr(tower, "intermediate_size", None) or 4 * hidden
            item = self._shape.item_bytes
            extra += patches * (item * (8 * hidden + 2 * inner) + 36 * self._patch_pixels)
            if not fused(tower):
                extra += tower.num_attention_heads * patches**2 * (item + 8)
            extra += max(width * height, self._scaled(width, height)) * PIXEL_BYTES
        return self._bytes_for(text_bytes(job) + tokens, job) + extra

    def size(self, job: Job) -> tuple[int, int]:
        """Text, images and answer in tokens; each image is a row of the tower's."""
        sizes = self._sizes(job)
        tokens = text_bytes(job) + sum(self._counts(*size)[0] for size in sizes)
        return self._tokens_for(min(tokens, self._shape.context), job), self._rows(job)

    def _rows(self, job: Job) -> int:
        return 1 + len(_images(job))

    def _sizes(self, job: Job) -> list[tuple[int, int]]:
        """(width, height) of the job's images.

        Raises:
            InvalidParams: one is too large, or would be.
        """
        sizes = [_open(data).size for data in _images(job)]
        for width, height in sizes:
            if (scaled := self._scaled(width, height)) > PIXELS_MAX:
                raise InvalidParams(
                    f"the image of {width}x{height} pixels would have {scaled} as this model "
                    f"scales it; {PIXELS_MAX} at most"
                )
        return sizes

    def _scaled(self, width: int, height: int) -> int:
        """Pixels of an image once its shortest side is as long as the model wants it."""
        size = getattr(getattr(self._processor, "image_processor", None), "size", None) or {}
        wanted = size.get("shortest_edge") if hasattr(size, "get") else None
        if not wanted or size.get("longest_edge"):  # a number of pixels, or bounded by the other
            return 0
        return math.ceil(width * height * (int(wanted) / min(width, height)) ** 2)

    def _counts(self, width: int, height: int) -> tuple[int, int]:
        """An image's tokens in the prompt, and its patches in the vision tower."""
        tower = self._model.config.vision_config
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:  # a processor that cannot say: as many as the image has patches
            patches = -(-width * height // self._patch_pixels)
            return patches, patches
        figures = count(image_sizes=[(height, width)])
        tokens, tiles = figures["num_image_tokens"][0], figures["num_image_patches"][0]
        side = getattr(tower, "image_size", None)
        # Towers of one size see tiles of that size; the others are counted in patches already.
        per_tile = (side // tower.patch_size) ** 2 if isinstance(side, int) else 1
        return tokens, tiles * (per_tile + 1)

    def _message(self, item: Any) -> dict[str, Any]:
        mark = getattr(self._processor, "image_token", None)
        parts = parts_of(item)
        for part in parts:
            if part["type"] == "text" and mark and mark in part["text"]:
                raise InvalidParams(f"a message must not hold the model's image mark {mark!r}")
        # The pixels go past the template, in the same order.
        plain = [part if part["type"] == "text" else {"type": "image"} for part in parts]
        return {"role": item["role"], "content": plain}

    def _encode(self, job: Job) -> Any:
        self._sizes(job)
        images = [_decode(data) for data in _images(job)]
        prompt = self._prompt(job)
        inputs = self._processor(
            text=prompt,
            images=images or None,
            add_special_tokens=job.get("messages") is None,
            return_tensors="pt",
        )
        return inputs.to(self._model.dtype)


def _images(job: Job) -> list[bytes]:
    if job.get("messages") is None:
        return []
    images = [
        part["image"]
        for item in messages_of(job)
        for part in parts_of(item)
        if part["type"] == "image"
    ]
    if len(images) > IMAGES_MAX:
        raise InvalidParams(f"{len(images)} images in one request; {IMAGES_MAX} at most")
    return images


def _open(data: bytes) -> "Image.Image":
    """Read an image's header only, and refuse one that would be too large to decode."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:  # its text names an object of this process
        raise InvalidParams(
            f"the image is no {', '.join(FORMATS)}, or its beginning is damaged"
        ) from error
    # The warning counts too: a program may have made warnings errors.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidParams(f"the image has more than {PIXELS_MAX} pixels") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidParams(f"the image is no {', '.join(FORMATS)}: {error}") from error
    width, height = image.size
    if width * height > PIXELS_MAX:
        raise InvalidParams(f"the image has {width}x{height} pixels; {PIXELS_MAX} at most")
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise InvalidParams(
            f"the image has {width}x{height} pixels: a side may be {ASPECT_MAX} times as long as "
            "the other"
        )
    return image


def _decode(data: bytes) -> "Image.Image":
    image = _open(data)
    try:
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidParams(f"the image cannot be decoded: {error}") from error
