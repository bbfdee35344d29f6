"""Image and speech models answer, refuse, and stop."""

import io
import itertools
from typing import Any

import pytest

from tests.demo.fixtures import runner, tone
from umad.errors import InvalidParams

pytestmark = [
    pytest.mark.models,
    pytest.mark.slow,
    # diffusers' schedulers hand torch tensors to numpy 2; nothing that we call
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def never() -> bool:
    return False


def paint(**job: Any) -> list[bytes]:
    base = {"prompt": "a wooden boat", "width": 128, "height": 64, "steps": 2, "n": 1, "seed": 5}
    images: list[bytes] = runner("image").run({**base, **job}, never).data["images"]
    return images


def hear(audio: bytes, **job: Any) -> dict[str, Any]:
    return runner("speech").run({"audio": audio, "language": "en", **job}, never).data


def test_images_are_painted() -> None:
    from PIL import Image

    images = paint(n=2)
    assert len(set(images)) == 2
    assert [Image.open(io.BytesIO(image)).size for image in images] == [(128, 64)] * 2


def test_a_seed_paints_the_same_image_again() -> None:
    assert paint() == paint()
    assert paint() != paint(seed=6)
    assert paint(seed=None) != paint(seed=None)


def test_cancelling_ends_the_painting_early() -> None:
    asked = itertools.count()
    job = {"prompt": "x", "width": 64, "height": 64, "steps": 100, "n": 3, "seed": 1}
    result = runner("image").run(job, lambda: next(asked) >= 3)
    assert result.data == {"images": []}
    assert next(asked) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 100}, "multiples of 8, not 100x64"),
        ({"height": 8}, "height must be a whole number from 64"),
        ({"width": 1 << 20}, "width"),
        ({"steps": 0}, "steps"),
        ({"n": 11}, "n must be"),
        ({"prompt": " "}, "prompt is empty"),
        ({"prompt": 5}, "prompt must be text"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_an_image_model_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        paint(**change)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_speech_is_heard_in_every_format(form: str) -> None:
    answer = hear(tone(1.5, 44_100, 2, form))
    assert isinstance(answer["text"], str)
    assert answer["duration_s"] == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("language", [None, "en", "German", "zh"])
def test_a_language_is_taken_or_found(language: str | None) -> None:
    assert hear(tone(1), language=language)["text"]


def test_more_than_one_window_is_heard() -> None:
    answer = hear(tone(70))
    assert answer["text"]
    assert "<|" not in answer["text"]
    assert answer["duration_s"] == 70


def test_resampling_keeps_the_tone() -> None:
    import torch

    from umad.serve.kinds.speech import decode

    wanted, _ = decode({"audio": tone(1, 16_000)})
    for rate in (8_000, 44_100, 48_000):
        wave, duration_s = decode({"audio": tone(1, rate, 2)})
        assert (wave.shape, duration_s) == (wanted.shape, 1.0)
        assert torch.allclose(wave[100:-100], wanted[100:-100], atol=2e-3)


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (b"no sound at all", "cannot be read"),
        (b"", "cannot be read"),
        (tone(0), "holds no sound"),
        (tone(0.1, 2_000), "2000 Hz"),
        (tone(0.01, channels=17), "17 channels"),
        ("text", "must be the bytes"),
    ],
)
def test_a_speech_model_refuses(audio: Any, said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        hear(audio)


def test_a_long_recording_is_refused_by_its_header() -> None:
    import numpy as np
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(7201 * 4000, dtype=np.int16), 4000, format="FLAC")
    for call in (runner("speech").bytes_needed, lambda job: runner("speech").run(job, never)):
        with pytest.raises(InvalidParams, match="lasts 7201 s; 7200 s at most"):
            call({"audio": file.getvalue()})


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(InvalidParams, match="no language 'klingon'; it knows de, en"):
        hear(tone(1), language="klingon")


def test_cancelling_ends_the_hearing_early() -> None:
    asked = itertools.count()
    result = runner("speech").run({"audio": tone(70)}, lambda: next(asked) >= 2)
    assert result.data["text"] == ""
    assert next(asked) == 3
