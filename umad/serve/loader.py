"""From a checkpoint folder to a model that answers.

Owns what all kinds share at load: nothing is fetched from a network, the libraries keep quiet,
weights that are a mapping of their file become memory of our own (a mapping is seen by no
allocator, so by no quota), and progress is told.  One load at a time for each thread.
"""

import os
import threading
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, Final

from umad.errors import InvalidParams, ModelFailed
from umad.serve.kinds.base import Runner, Source
from umad.serve.kinds.embedding import EmbeddingRunner
from umad.serve.kinds.image import ImageRunner
from umad.serve.kinds.speech import SpeechRunner
from umad.serve.kinds.text import TextRunner
from umad.serve.kinds.vision import VisionRunner

Progress = Callable[[str, float], None]

RUNNERS: Final[dict[str, Any]] = {
    runner.kind: runner
    for runner in (TextRunner, VisionRunner, ImageRunner, SpeechRunner, EmbeddingRunner)
}
_told = threading.local()  # .progress: the loading thread's own


def quiet() -> None:
    """No network, no progress bars and no advice on stderr from the libraries; idempotent."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["DIFFUSERS_OFFLINE"] = "1"
    # Set before diffusers reads it: importing it logs which processors lack torchvision.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

    tqdm.monitor_interval = 0  # no thread that watches bars which nobody sees
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (transformers_logging, diffusers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    transformers_logging.set_tqdm_hook(_bar)


def load(
    kind: str, path: str, *, device: str = "cpu", dtype: str = "auto", progress: Progress
) -> Runner:
    """Read a model from its folder.

    Args:
        kind: one of settings.MODEL_KINDS.
        path: a folder as save_pretrained writes it.
        device: a torch device.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        progress: told the stage ("reading", "building", "ready") and the part of it that is
            done (0..1), in this thread.

    Raises:
        InvalidParams: no such kind.
        ModelFailed: the folder holds no such model, or a file in it is broken.
    """
    if kind not in RUNNERS:
        raise InvalidParams(f"unknown kind {kind!r}; use one of {', '.join(RUNNERS)}")
    if not any((Path(path) / name).is_file() for name in ("config.json", "model_index.json")):
        raise ModelFailed(f"{path} holds no config.json or model_index.json")
    progress("reading", 0.0)
    quiet()
    if device != "cpu":
        # Else transformers reads the weights in threads of its own, whose device memory would be
        # charged to nobody: torch knows which pool a thread is in, and inherits it to none.
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    from safetensors import SafetensorError

    from umad.serve.dtypes import own_default_dtype
    from umad.serve.linear import quicken

    def resident(module: Any) -> int:
        progress("building", 0.0)
        from umad.client.torch_hooks import measure, privatise

        privatise(module)
        module.requires_grad_(requires_grad=False)
        quicken(module)
        return measure(module)

    _told.progress = progress
    try:
        with own_default_dtype():
            runner: Runner = RUNNERS[kind].load(Source(path, device, dtype), resident)
    except (OSError, ValueError, KeyError, AttributeError, ImportError, SafetensorError) as error:
        raise ModelFailed(f"{path} cannot be loaded as kind {kind!r}: {error}") from error
    finally:
        del _told.progress
    progress("ready", 1.0)
    return runner


def _bar(factory: Any, args: tuple[Any, ...], values: dict[str, Any]) -> Any:
    """Turn transformers' bar over the weights into our progress; it stays a bar of its kind."""
    progress = getattr(_told, "progress", None)
    items = args[0] if args else values.get("iterable")
    if progress is None or not isinstance(items, Sized):
        return factory(*args, **values)
    return _Counted(factory(*args, **values), len(items), progress)


class _Counted:
    """A bar that also tells how far it is, a hundred times at most."""

    def __init__(self, bar: Any, total: int, progress: Progress) -> None:
        self._bar, self._total, self._progress = bar, total, progress

    def __iter__(self) -> Any:
        told = 0
        for done, item in enumerate(self._bar, start=1):
            yield item
            if 100 * done // self._total > told:
                told = 100 * done // self._total
                self._progress("reading", done / self._total)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
