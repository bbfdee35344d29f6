"""Kind "image": Stable Diffusion with a UNet (1.x, 2.x, XL).

Job: ``prompt``, ``width`` and ``height`` in pixels, ``steps``, ``n``, ``seed`` (of the first image;
each next one has the next).
Result: ``images``, a list of ``n`` PNG files.

Jobs of one size and as many steps are painted together, each image from its own source of chance,
so that it is the one that its job gets alone.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from umad.core.batching import Bounds
from umad.errors import InvalidParams, ModelFailed
from umad.serve.kinds.base import (
    RUN_BYTES,
    SEED_MAX,
    Cancelled,
    Job,
    Prepared,
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


@dataclass(frozen=True, slots=True)
class _Image:
    """One that is wanted; without a seed it is another each time."""

    prompt: str
    seed: int | None


class ImageRunner:
    """A diffusers pipeline."""

    kind = "image"
    # They all end with the last step, so where company saves little they are better one by one.
    # Source: our rough measurement, 2 cores, a UNet of 35 million weights: four save a quarter at
    # 64x64 pixels, and nothing that stood out of the noise at 128x128. The measured pace decides.
    bounds = Bounds(rows_max=4, area_min=0)
    unit = 64  # of 512x512 pixels an image has 4096 places

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
        pipeline.vae.enable_slicing()  # it takes more than all else, and gains nothing by company
        parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return cls(pipeline, resident(torch.nn.ModuleList(parts)))

    def bytes_needed(self, job: Job) -> int:
        """One image at a time, and the results."""
        width, height, count = self._size(job)
        return self._bytes_for(width * height, 1) + width * height * 3 * (count - 1)

    def bytes_together(self, tokens: int, rows: int) -> int:
        """All images at once."""
        return self._bytes_for(tokens * self._pipeline.vae_scale_factor**2, rows)

    def _bytes_for(self, pixels: int, rows: int) -> int:
        """The larger of the UNet's and the VAE's peak, and the results.

        Source: the tensors of diffusers' blocks.  UNet: at each level the skips that wait for the
        way up, and in the level being worked on the joined input, its norm, the output and the
        feed-forward's eight times the width.  VAE, which decodes one image at a time: at full size
        the widest two levels meet; input, norm, activation, output and the convolution's own copy
        are held together.  Attention is fused in both, so it has no matrix.
        """
        needed = max(rows * self._unet_bytes(pixels), self._vae_bytes(pixels))
        # The float32 picture as tensor, its copy and its array; bytes as PIL; one PNG for each.
        return needed + rows * pixels * 3 * (3 * 4 + 2 + 1) + RUN_BYTES

    def size(self, job: Job) -> tuple[int, int]:
        """Places of the latent picture, and pictures."""
        width, height, count = self._size(job)
        return width * height // self._pipeline.vae_scale_factor**2, count

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Paint the images, one after the other."""
        (result,) = self.run_together([self.prepare(job)], cancelled)
        return result

    def prepare(self, job: Job) -> Prepared:
        """Check all that the job asks for."""
        width, height, count = self._size(job)
        prompt, steps = text(job, "prompt"), whole(job, "steps", 1, STEPS_MAX)
        if not prompt.strip():
            raise InvalidParams("the prompt is empty")
        seed = None if job.get("seed") is None else whole(job, "seed", 0, SEED_MAX)
        wanted = [
            _Image(prompt, None if seed is None else (seed + at) % (SEED_MAX + 1))
            for at in range(count)
        ]
        sizes = (*self.size(job), self.bytes_needed(job))
        return Prepared(*sizes, wanted, alike=(width, height, steps), passes=steps)

    def run_together(self, jobs: Sequence[Prepared], cancelled: Cancelled) -> list[Result]:
        """Paint the images of several jobs at once; those of a single one one after the other."""
        size: Any = jobs[0].alike
        wanted: list[_Image] = [one for job in jobs for one in job.inputs]
        at_once = 1 if len(jobs) == 1 else len(wanted)
        painted: list[bytes] = []
        try:
            for at in range(0, len(wanted), at_once):
                if cancelled():
                    break
                painted += self._paint(wanted[at : at + at_once], size, cancelled)
        except Stop:
            pass
        rest, shown = iter(painted), (jobs[0].tokens, at_once)
        return [Result({"images": list(islice(rest, job.rows))}, shown) for job in jobs]

    def _paint(
        self, wanted: "list[_Image]", size: tuple[int, int, int], cancelled: Cancelled
    ) -> list[bytes]:
        import torch

        width, height, steps = size

        def each_step(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            if cancelled():
                raise Stop
            return values

        with torch.inference_mode():
            painted = self._pipeline(
                prompt=[one.prompt for one in wanted],
                width=width,
                height=height,
                num_inference_steps=steps,
                # On the CPU, so that a seed paints the same picture on every device.
                generator=[generator({"seed": one.seed}, "cpu") for one in wanted],
                callback_on_step_end=each_step,
            )
        return [_png(picture) for picture in painted.images]

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


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


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
