"""What bytes_needed says is enough, and not absurdly much; and it grows as the job does."""

import random
from typing import Any

import pytest

from tests.demo.fixtures import peak_bytes, photo, runner, tone
from umad.errors import InvalidParams
from umad.serve.kinds.base import RUN_BYTES
from umad.units import GIB, MIB

pytestmark = [
    pytest.mark.models,
    pytest.mark.slow,
    # diffusers' schedulers hand torch tensors to numpy 2; nothing that we call
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
# Letters by chance: nearly one token for each byte, so that the bound on tokens is a close one.
LETTERS = "".join(random.Random(5).choices("bcdfghjklmnpqrstvwxz23456789", k=1900))
# The same in words: BERT's tokenizer makes one token of a word that is too long.
WORDS = " ".join(LETTERS[at : at + 8] for at in range(0, 400, 8))
PAINT = {"prompt": "a boat", "steps": 1, "n": 1, "seed": 1}


def prompt(length: int, new: int = 8) -> dict[str, Any]:
    return {"prompt": LETTERS[:length], "max_tokens": new, "temperature": 1.0, "top_p": 0.9}


def look(count: int, side: int, height: int = 0) -> dict[str, Any]:
    parts = [{"type": "image", "image": photo(side, height or side)}] * count
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("kind", "name", "job", "factor"),
    [
        ("chat", "llama", prompt(1900), 3),
        ("chat", "llama", prompt(100, 100) | {"temperature": 0}, 4),
        ("chat", "qwen", prompt(1900), 3),
        ("vision", None, look(1, 200), 5),
        ("vision", None, look(8, 100), 3),
        ("image", None, PAINT | {"width": 128, "height": 128}, 3),
        ("image", None, PAINT | {"width": 512, "height": 256}, 3),
        ("image", None, PAINT | {"width": 768, "height": 768}, 3),
        ("speech", None, {"audio": tone(2), "language": "en"}, 4),
        ("speech", None, {"audio": tone(60, 44_100, 2), "language": "en"}, 4),
        ("embedding", None, {"texts": [WORDS[:20]] * 300}, 4),
        ("embedding", None, {"texts": [WORDS[:240]] * 50}, 4),
    ],
)
def test_enough_is_asked_and_not_absurdly_much(
    kind: str, name: str | None, job: dict[str, Any], factor: float
) -> None:
    model = runner(kind, name)
    needed = model.bytes_needed(job)
    held = peak_bytes(lambda: model.run(job, lambda: False))
    assert held <= needed <= factor * held + RUN_BYTES


@pytest.mark.parametrize(
    ("kind", "jobs", "factor"),
    [
        ("image", [PAINT | {"width": 256, "height": 256}] * 4, 3),
        ("speech", [{"audio": tone(2), "language": "en"}] * 3, 4),
        ("speech", [{"audio": tone(60, 48_000), "language": "en"}] * 2, 4),
    ],
)
def test_enough_is_asked_for_several_together(
    kind: str, jobs: list[dict[str, Any]], factor: float
) -> None:
    model: Any = runner(kind)
    read = [model.prepare(job) for job in jobs]
    needed = model.bytes_together(read[0].tokens, len(jobs))
    held = peak_bytes(lambda: model.run_together(read, lambda: False))
    assert held <= needed <= factor * held + RUN_BYTES


@pytest.mark.parametrize(
    ("kind", "small", "large"),
    [
        ("chat", prompt(100), prompt(1000)),
        ("chat", prompt(100, 10), prompt(100, 1000)),
        ("vision", look(1, 100), look(2, 100)),
        ("vision", look(1, 100), look(1, 1000)),
        ("image", PAINT | {"width": 512, "height": 512}, PAINT | {"width": 512, "height": 520}),
        ("image", PAINT | {"width": 64, "height": 64}, PAINT | {"width": 64, "height": 64, "n": 2}),
        ("speech", {"audio": tone(40)}, {"audio": tone(80)}),
        ("speech", {"audio": tone(40)}, {"audio": tone(40, 48_000)}),
        ("embedding", {"texts": ["boat"] * 5}, {"texts": ["boat"] * 6}),
        ("embedding", {"texts": ["boat"]}, {"texts": ["boat " * 20]}),
    ],
)
def test_a_larger_job_needs_more(kind: str, small: dict[str, Any], large: dict[str, Any]) -> None:
    model = runner(kind)
    assert model.bytes_needed(small) < model.bytes_needed(large)


def test_a_monstrous_image_asks_for_what_no_machine_has() -> None:
    assert runner("image").bytes_needed(PAINT | {"width": 16384, "height": 16384}) > 128 * GIB


@pytest.mark.parametrize(
    ("width", "height", "said"),
    [(1, 60_000, "100 times as long"), (60_000, 1, "100 times"), (6, 600, None)],
)
def test_a_thin_image_is_refused_before_it_is_scaled_to_a_monster(
    width: int, height: int, said: str | None
) -> None:
    model, job = runner("vision"), look(1, width, height)
    if said is None:
        assert model.bytes_needed(job) > 112 * 11_200 * 21
        return
    for ask in (model.bytes_needed, model.size, lambda one: model.run(one, lambda: False)):
        with pytest.raises(InvalidParams, match=said):
            ask(job)


def test_a_model_that_scales_by_the_shortest_side_bounds_what_comes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = runner("vision")
    monkeypatch.setattr(model, "_scaled", lambda *_: 50_000_000)
    with pytest.raises(InvalidParams, match="60x600 pixels would have 50000000"):
        model.bytes_needed(look(1, 60, 600))


def test_a_monstrous_prompt_asks_for_no_more_than_the_context() -> None:
    most = runner("chat").bytes_needed(prompt(1900, 10_000))
    endless = {"prompt": "x" * 10_000_000, "max_tokens": 1 << 30}
    assert most <= runner("chat").bytes_needed(endless) < 2 * most < 200 * MIB


def test_the_largest_known_shape_costs_what_its_papers_say() -> None:
    from umad.serve.kinds.text import Shape

    # Llama 3 70B in bfloat16: its cache takes 320 KiB for each token.
    shape = Shape(80, 8192, 28672, 64, 8, 128, 128_256, 8192, 2, True, False)
    grown = shape.bytes_needed(0, 8192) - shape.bytes_needed(0, 0)
    assert 8192 * 320 * 1024 <= grown <= 1.15 * 8192 * 320 * 1024
