"""What a job's cost is counted by: known before it runs, never less than what the run shows."""

from typing import Any

import pytest

from tests.demo.fixtures import runner, tone
from tests.serve.test_kinds_costs import PAINT, look, prompt
from umad.errors import InvalidParams

pytestmark = [
    pytest.mark.models,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("kind", "job"),
    [
        ("chat", prompt(300)),
        ("chat", {"messages": [{"role": "user", "content": "What is a ledger?"}], "max_tokens": 3}),
        ("vision", look(2, 60)),
        ("embedding", {"texts": ["a boat", "a boat on a lake " * 9, "x"]}),
    ],
)
def test_the_bound_holds_and_is_close_for_a_prompt(kind: str, job: dict[str, Any]) -> None:
    model = runner(kind)
    tokens, rows = model.size(job)
    shown = model.run(job, never)
    assert shown.size is not None
    assert shown.size[0] <= tokens
    assert shown.size[1] == rows
    if kind == "chat":  # to the token, unless it stops early
        assert shown.size[0] - shown.data["completion_tokens"] + job["max_tokens"] == tokens
    if kind == "vision":
        assert rows == 3


def test_units_of_kinds_without_tokens() -> None:
    paint, hear = runner("image"), runner("speech")
    assert paint.size(PAINT | {"width": 128, "height": 128, "n": 2}) == (
        4 * paint.size(PAINT | {"width": 64, "height": 64})[0], 2,
    )  # fmt: skip
    two = PAINT | {"width": 64, "height": 64, "n": 2}
    assert paint.run(two, never).size == (64, 1)  # one after the other
    assert hear.size({"audio": tone(2)}) == (3000, 1)  # one window of 30 s
    assert hear.size({"audio": tone(45)}) == (4500, 1)


def test_a_context_bounds_a_size_and_nonsense_is_refused() -> None:
    chat = runner("chat")
    assert chat.size(prompt(100, 10_000))[0] == 2048 + 1
    with pytest.raises(InvalidParams):
        chat.size({"prompt": "", "max_tokens": 3})
    with pytest.raises(InvalidParams):
        runner("embedding").size({"texts": []})
