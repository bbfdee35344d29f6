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


def test_images_painted_together_are_those_painted_alone():
    import numpy as np
    from PIL import Image

    model: Any = runner("image")
    base = {"width": 128, "height": 64, "steps": 2}
    asked = [("a wooden boat", 5, 2), ("night", 6, 1), ("a wooden boat " * 40, 2**63 - 1, 1)]
    jobs = [{**base, "prompt": prompt, "seed": seed, "n": n} for prompt, seed, n in asked]
    together = model.run_together([model.prepare(job) for job in jobs], never)
    assert [len(result.data["images"]) for result in together] == [2, 1, 1]
    for result, job in zip(together, jobs, strict=True):
        for ours, alone in zip(result.data["images"], paint(**job), strict=True):
            seen, wanted = (
                np.asarray(Image.open(io.BytesIO(one)), dtype=int) for one in (ours, alone)
            )
            # A matrix of more rows is added up in another order: a hair's breadth in float32.
            assert abs(seen - wanted).max() <= 1
            assert (seen == wanted).mean() > 0.99
    # The second image of a job is the first one of the next seed.
    assert paint(n=2)[1] == paint(seed=6)[0]


def test_only_images_of_one_size_and_as_many_steps_are_alike():
    model: Any = runner("image")
    base = {"prompt": "x", "width": 128, "height": 64, "steps": 2, "n": 1, "seed": None}
    first = model.prepare(base)
    assert (first.alike, first.passes) == (model.prepare({**base, "prompt": "y"}).alike, 2)
    for other in ({"width": 64, "height": 128}, {"steps": 3}):
        assert model.prepare({**base, **other}).alike != first.alike


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


def noise(seconds: float, seed: int, rate: int = 16_000) -> bytes:
    import numpy as np
    import soundfile

    wave = np.random.default_rng(seed).normal(0, 0.01 * (1 + seed), int(rate * seconds))
    file = io.BytesIO()
    soundfile.write(file, wave.astype("float32"), rate, format="WAV")
    return file.getvalue()


@pytest.mark.parametrize(
    "jobs",
    [
        [{"audio": tone(2), "language": "en"}, {"audio": noise(9, 1, 44_100)}, {"audio": tone(9)}],
        [{"audio": noise(2, 1), "segments": True}, {"audio": tone(5), "segments": True}],
        [{"audio": noise(31, 1)}, {"audio": tone(40), "language": "de", "segments": True}],
    ],
)
def test_files_heard_together_say_what_each_says_alone(jobs: list[dict[str, Any]]):
    model: Any = runner("speech")
    read = [model.prepare(job) for job in jobs]
    assert len({job.alike for job in read}) == 1
    together = [result.data for result in model.run_together(read, never)]
    assert together == [model.run(job, never).data for job in jobs]
    assert len({answer["text"] for answer in together}) > 1


def test_files_that_would_change_each_others_answer_or_cost_are_not_alike():
    model: Any = runner("speech")
    jobs = [
        {"audio": tone(2)},
        {"audio": tone(2), "segments": True},
        {"audio": tone(31)},
        {"audio": tone(1, 96_000)},
        {"audio": tone(1, 96_000)},
    ]
    assert len({model.prepare(job).alike for job in jobs}) == len(jobs)


def test_segments_lie_within_the_file_and_hold_all_of_its_text():
    answer = hear(tone(40), segments=True)
    segments = answer["segments"]
    assert [one["id"] for one in segments] == list(range(len(segments)))
    assert all(0 <= one["start"] <= one["end"] <= 40 for one in segments)
    assert segments == sorted(segments, key=lambda one: one["start"])
    assert "".join(one["text"] for one in segments).split() == answer["text"].split()
    assert answer["language"] == "english"


def test_a_model_without_time_stamps_gives_one_segment(monkeypatch: pytest.MonkeyPatch):
    model: Any = runner("speech")
    monkeypatch.delattr(model._model.generation_config, "no_timestamps_token_id")
    answer = hear(tone(1), segments=True)
    (one,) = answer["segments"]
    assert (one["id"], one["start"], one["end"]) == (0, 0.0, 1.0)
    assert one["text"].strip() == answer["text"]


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
        (b"no sound at all", "^the audio cannot be read: Format not recognised$"),
        (b"", "^the audio cannot be read: Format not recognised$"),
        (tone(0), "holds no sound"),
        (tone(0.1, 2_000), "the audio has 2000 Hz; 4000 to"),
        (tone(0.01, channels=17), "17 channels; "),
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
