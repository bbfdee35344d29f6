"""Chat and vision models answer, refuse, sample and stop."""

import itertools
import math
import struct
import threading
import zlib
from typing import Any

import pytest

from tests.demo.fixtures import checkpoints, photo, runner
from umad.errors import InvalidParams

pytestmark = [pytest.mark.models, pytest.mark.slow]
HELLO = [{"role": "user", "content": "Which boat does the captain paint?"}]


def never() -> bool:
    return False


def ask(kind: str = "chat", name: str | None = None, /, **job: Any) -> dict[str, Any]:
    base = {"messages": HELLO, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 7}
    return runner(kind, name).run({**base, "stop": [], **job}, never).data


def looking(*images: bytes, text: str = "What is this?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG file, and nothing behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"")


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_chat_model_answers(name: str) -> None:
    answer = ask("chat", name)
    counted = {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert set(answer) == {"text", "finish_reason", *counted}
    assert answer["cached_tokens"] == 0
    assert answer["text"]
    assert 1 <= answer["completion_tokens"] <= 12
    assert answer["prompt_tokens"] > 5


def test_a_plain_prompt_is_completed() -> None:
    answer = ask(messages=None, prompt="The captain", temperature=0, max_tokens=3)
    assert (answer["completion_tokens"], answer["finish_reason"]) == (3, "length")


@pytest.mark.parametrize("kind", ["chat", "vision"])
def test_a_seed_gives_the_same_answer_again(kind: str) -> None:
    import torch

    first = ask(kind, seed=1)
    torch.manual_seed(99)  # another thread may do so at any time
    assert ask(kind, seed=1) == first
    assert len({ask(kind, seed=seed)["text"] for seed in range(5)}) > 1
    assert len({ask(kind, seed=None)["text"] for _ in range(5)}) > 1


def test_a_seed_holds_while_other_models_draw() -> None:
    alone = {name: ask("chat", name, max_tokens=40) for name in ("llama", "qwen")}
    together: dict[str, Any] = {}

    def work(name: str) -> None:
        together[name] = ask("chat", name, max_tokens=40)

    threads = [threading.Thread(target=work, args=(name,)) for name in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_draws_follow_the_model_s_probabilities() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, runs, temperature = checkpoints() / "llama", 300, 0.15
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer("The captain", return_tensors="pt")).logits[0, -1]
    best = (logits / temperature).softmax(-1).max().item()
    likeliest = tokenizer.decode([int(logits.argmax())])
    job = {"messages": None, "prompt": "The captain", "max_tokens": 1, "temperature": temperature}
    hits = sum(ask(**job, seed=seed)["text"] == likeliest for seed in range(runs))
    assert 0.05 < best < 0.95
    assert abs(hits - runs * best) < 4 * math.sqrt(runs * best * (1 - best))
    assert all(ask(**job, top_p=0.001, seed=seed)["text"] == likeliest for seed in range(5))


def test_a_stop_string_ends_the_answer_before_it() -> None:
    whole = ask(max_tokens=40, temperature=0)
    stop = whole["text"][6:9]
    cut = ask(max_tokens=40, temperature=0, stop=["never said", stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["completion_tokens"] < whole["completion_tokens"]


def test_the_answer_ends_where_the_context_ends() -> None:
    answer = ask(messages=None, prompt="1" * 2000, max_tokens=1000, temperature=0)
    assert answer["prompt_tokens"] + answer["completion_tokens"] <= 2048


@pytest.mark.parametrize("kind", ["chat", "vision"])
def test_cancelling_ends_the_answer_early(kind: str) -> None:
    asked = itertools.count()
    job = {"messages": HELLO, "max_tokens": 500, "temperature": 0}
    answer = runner(kind).run(job, lambda: next(asked) >= 3).data
    assert answer["completion_tokens"] <= 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": []}, "not empty"),
        ({"messages": ["x"]}, "unknown role 'x'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "unknown part 'audio'"),
        ({"messages": looking(b"")}, "reads text only"),
        ({"messages": None, "prompt": ""}, "prompt is empty"),
        ({"messages": None}, "prompt must be text"),
        ({"messages": None, "prompt": "1" * 3000}, r"3000 tokens.*2048"),
        ({"messages": None, "prompt": "1" * 300_000}, r"300000 characters.*2048 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ["x"] * 17}, "17 texts"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_a_chat_model_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        ask(**change)


def test_a_chat_model_reads_a_list_of_texts() -> None:
    texts = ("Which boat does the ", "captain paint?")
    parts = [{"type": "text", "text": text} for text in texts]
    assert ask(messages=[{"role": "user", "content": parts}]) == ask()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_vision_model_sees(form: str) -> None:
    blind = ask("vision", messages=looking())
    answer = ask("vision", messages=looking(photo(form=form)))
    assert answer["prompt_tokens"] == blind["prompt_tokens"] + 64 + 1  # and the template's newline
    assert answer["text"] != blind["text"]
    assert ask("vision", messages=looking(photo(), photo()))["prompt_tokens"] > 128


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (b"no image at all", "^the image is no PNG, JPEG, WEBP, or its beginning is damaged$"),
        (photo()[:5000], "cannot be decoded"),
        (png_header(100_000, 100_000), "more than 40000000 pixels"),
    ],
)
def test_a_vision_model_refuses_an_image(image: bytes, said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        ask("vision", messages=looking(image))


def test_a_large_image_is_refused_by_its_header() -> None:
    wide = png_header(8000, 5200)
    for call in (runner("vision").bytes_needed, lambda job: runner("vision").run(job, never)):
        with pytest.raises(InvalidParams, match="8000x5200 pixels; 40000000 at most"):
            call({"messages": looking(wide), "max_tokens": 1})


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (looking(*[b"x"] * 17), "17 images"),
        (looking(text="look <image> here"), "image mark '<image>'"),
        (looking(*[photo()] * 16) * 2, "32 images"),
    ],
)
def test_a_vision_model_refuses_messages(messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        ask("vision", messages=messages)
