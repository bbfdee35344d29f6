"""Kind "image": Stable Diffusion with a UNet (1.x, 2.x, XL).

Job: ``prompt``, ``width`` and ``height`` in pixels, ``steps``, ``n``, ``seed``.
Result: ``images``, a list of ``n`` PNG files.
"""

import io
from pathlib import Path
from typing import Any, Final

from umad.errors import InvalidParams, ModelFailed
from umad.serve.kinds.base import (
    RUN_BYTES,
    Cancelled,
    Job,
    Result,
    Source,
    Stop,
    generator,
    text,
    whole,
)

SIDE_MIN: Final = 64
SIDE_MAX: Final = 1 << 16
STEPS_MAX: Final = 250
IMAGES_MAX: Final = 10
GUIDED: Final = 2  # classifier-free guidance: each latent goes with and without the prompt


class ImageRunner:
    """A diffusers pipeline."""

    kind = "image"

    def __init__(self, pipeline: Any, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._pipeline = pipeline

    @classmethod
    def load(cls, source: Source, resident: Any) -> "ImageRunner":
        """Read it from its folder; ``source.dtype`` "auto" is what the UNet's file holds."""
        import torch
        from diffusers import DiffusionPipeline

        variant, own = _weights(Path(source.path) / "unet")
        pipeline = DiffusionPipeline.from_pretrained(
            source.path,
            local_files_only=True,
            use_safetensors=True,
            variant=variant,
            dtype=own if source.dtype == "auto" else getattr(torch, source.dtype),
        )
        pipeline.to(source.device)
        pipeline.set_progress_bar_config(disable=True)
        parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return cls(pipeline, resident(torch.nn.ModuleList(parts)))

    def bytes_needed(self, job: Job) -> int:
        """One image at a time: the larger of the UNet's and the VAE's peak, and the results.

        Source: the tensors of diffusers' blocks.  UNet: at each level the skips that wait for the
        way up, and in the level being worked on the joined input, its norm, the output and the
        feed-forward's eight times the width.  VAE: at full size the widest two levels meet; input,
        norm, activation, output and the convolution's own copy are held together.  Attention is
        fused in both, so it has no matrix.
        """
        width, height, count = self._size(job)
        pixels = width * height
        needed = max(self._unet_bytes(pixels), self._vae_bytes(pixels))
        # The float32 picture as tensor, its copy and its array; bytes as PIL; one PNG for each.
        return needed + pixels * 3 * (3 * 4 + 2 + count) + RUN_BYTES

    def size(self, job: Job) -> tuple[int, int]:
        """Places of the latent picture, and pictures."""
        width, height, count = self._size(job)
        return width * height // self._pipeline.vae_scale_factor**2, count

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Paint the images, one after the other."""
        import torch

        width, height, count = self._size(job)
        prompt, steps = text(job, "prompt"), whole(job, "steps", 1, STEPS_MAX)
        if not prompt.strip():
            raise InvalidParams("the prompt is empty")
        # On the CPU, so that a seed paints the same picture on every device.
        source = generator(job, "cpu")

        def each_step(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            if cancelled():
                raise Stop
            return values

        images: list[bytes] = []
        try:
            for _ in range(count):
                if cancelled():
                    break
                with torch.inference_mode():
                    painted = self._pipeline(
                        prompt=prompt,
                        width=width,
                        height=height,
                        num_inference_steps=steps,
                        generator=source,
                        callback_on_step_end=each_step,
                    )
                file = io.BytesIO()
                painted.images[0].save(file, format="PNG")
                images.append(file.getvalue())
        except Stop:
            pass
        return Result({"images": images})

    def _size(self, job: Job) -> tuple[int, int, int]:
        step = self._pipeline.vae_scale_factor
        width = whole(job, "width", SIDE_MIN, SIDE_MAX)
        height = whole(job, "height", SIDE_MIN, SIDE_MAX)
        if width % step or height % step:
            raise InvalidParams(
                f"width and height must be multiples of {step}, not {width}x{height}"
            )
        return width, height, whole(job, "n", 1, IMAGES_MAX)

    def _unet_bytes(self, pixels: int) -> int:
        unet = self._pipeline.unet
        levels = unet.config.block_out_channels
        layers = unet.config.layers_per_block
        layers = max(layers) if isinstance(layers, list | tuple) else layers
        area = pixels // self._pipeline.vae_scale_factor**2
        skips = sum(area // 4**at * width * (layers + 1) for at, width in enumerate(levels))
        # On the way up a level's input is as wide as the level below it.
        work = max(area // 4**at * max(levels[at : at + 2]) * 20 for at in range(len(levels)))
        return int(GUIDED * unet.dtype.itemsize * (skips + work))

    def _vae_bytes(self, pixels: int) -> int:
        vae = self._pipeline.vae
        widest = max(vae.config.block_out_channels[:2])
        item, copy = vae.dtype.itemsize, 0
        if item == 2 and getattr(vae.config, "force_upcast", False):
            # The pipeline turns the whole VAE to float32 for each picture.
            item, copy = 4, 4 * sum(weight.numel() for weight in vae.parameters())
        return int(pixels * widest * item * 5 + copy)


def _weights(folder: Path) -> tuple[str | None, Any]:
    """The variant of the files in a folder ("fp16" or none), and the type of their weights."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFailed(f"{folder} holds no *.safetensors; only pipelines with a UNet are run")
    full = [file for file in files if ".fp16" not in file.suffixes]
    with safe_open((full or files)[0], framework="pt") as weights:
        first = weights.get_tensor(next(iter(weights.keys())))
    return (None if full else "fp16"), first.dtype
