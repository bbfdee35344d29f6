"""The real MiniLM, out of the package that carries it."""

import math
from typing import Any

import pytest

from tests.demo.fixtures import runner
from umad.errors import InvalidParams

pytestmark = [pytest.mark.models, pytest.mark.slow]


def embed(*texts: Any) -> dict[str, Any]:
    return runner("embedding").run({"texts": list(texts)}, lambda: False).data


def likeness(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_like_sentences_lie_closer_than_unlike_ones() -> None:
    answer = embed(
        "A cat sits on the mat", "A kitten rests on a rug", "The central bank raised its rates"
    )
    cat, kitten, bank = answer["vectors"]
    assert likeness(cat, kitten) > 0.5 > likeness(cat, bank)
    assert [len(vector) for vector in answer["vectors"]] == [384] * 3
    assert all(math.isclose(likeness(vector, vector), 1, abs_tol=1e-5) for vector in (cat, bank))


def test_a_text_has_the_same_vector_in_any_company() -> None:
    texts = ["boat", "a much longer sentence about a boat " * 12, "", "boat"]
    vectors = embed(*texts, *["the sea " * 60] * 100)["vectors"]
    assert len(vectors) == 104
    for text, vector in zip(texts, vectors, strict=False):
        assert likeness(vector, embed(text)["vectors"][0]) == pytest.approx(1, abs=1e-4)


def test_the_vectors_are_those_of_sentence_transformers() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from tests.demo.fixtures import minilm

    model = sentence_transformers.SentenceTransformer(str(minilm()), device="cpu")
    text = "The captain paints a wooden boat."
    theirs, (ours,) = model.encode([text])[0].tolist(), embed(text)["vectors"]
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_tokens_are_counted() -> None:
    assert embed("boat")["tokens"] == 3  # and the two special ones
    assert embed("boat", "boat")["tokens"] == 6


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "0 items"),
        (["x"] * 2049, "2049 items"),
        ([5], "list of texts"),
        (["fine", "word " * 300], "text 1 has 302 tokens; the model's context is 256"),
        (["x" * 10_000], "text 0 has 10000 characters"),
    ],
)
def test_an_embedding_model_refuses(texts: list[Any], said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        embed(*texts)


def test_cancelling_ends_the_embedding_early() -> None:
    result = runner("embedding").run({"texts": ["boat"] * 2000}, lambda: True)
    assert not any(result.data["vectors"])
