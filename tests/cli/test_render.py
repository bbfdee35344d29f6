from typing import Any

import pytest

from umad.cli import render


def lies(risk: str, step: str | None = None) -> dict[str, Any]:
    one = {"risk": risk, "reason": "only 0 B in blocks of 4.0 MiB"}
    return {**one, "step": step, "devices": [{"pid": 77, **one}]}


def test_fragmentation_is_a_line_when_it_is_high() -> None:
    assert [text.plain.strip() for text in render.fragmented(lies("high", "compact"))] == [
        "free memory is fragmented: only 0 B in blocks of 4.0 MiB; step: compact",
        "device memory of pid 77 is fragmented: only 0 B in blocks of 4.0 MiB",
    ]


@pytest.mark.parametrize("risk", ["low", "unknown"])
def test_else_there_is_none(risk: str) -> None:
    assert list(render.fragmented(lies(risk))) == []


def test_the_pace_and_its_reason_are_shown() -> None:
    near = {"look_s": 0.2, "glance_s": 0.02, "reason": "near_limit"}
    told = [text.plain for text in render.pace({"pace": near, "pressed": True})]
    assert told == [
        "a look every 200.0 ms, a glance every 20.0 ms: a limit is near",
        "tasks stall on memory: twice the reserve is kept",
    ]
    assert list(render.pace({"pace": None, "pressed": False})) == []
