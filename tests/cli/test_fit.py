"""umadctl fit: a model's cost formula in words, for programs, and as a picture."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from tests.cli.test_umadctl import run
from tests.daemon.running import Raw, running
from umad.cli import fit
from umad.core.cost import SAMPLES_MIN
from umad.units import MIB

STOP = {
    "unix_s": 1_790_000_000.5,
    "reason": "over_quota",
    "fence": "sigkill",
    "measured_bytes": 5 << 30,
    "limit_bytes": 4 << 30,
}


def answer(count: int = 40, **more: Any) -> dict[str, Any]:
    samples = [
        [tokens := 100 + 37 * at % 900, 1, 2 * MIB + 4096 * tokens + at % 3 * 1000, 0, True]
        for at in range(count)
    ]
    known = {"model": "llama", "shape": "chat cpu auto 1", "samples": samples, "stops": []}
    return known | {"models": ["llama"]} | more


def shown(known: dict[str, Any]) -> str:
    """What a terminal of 80 columns shows."""
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        for part in fit.as_text(known):
            console.print(part)
    text = captured.get()
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_data_formula_and_residuals_are_shown() -> None:
    text = shown(answer(stops=[STOP]))
    assert "llama: 40 forwards measured" in text
    assert "bytes = 2.0 MiB + 4.0 KiB x tokens + margin" in text
    assert "predictions exceeded: 0 of 40" in text
    assert "over_quota, held 5.0 GiB of 4.0 GiB" in text
    assert "more since" not in text
    _, _, table = text.partition("FORWARDS")
    groups = [line.split() for line in table.splitlines()[1:] if "MiB" in line and "-" in line]
    assert sum(int(words[2]) for words in groups if words[1] == "1") == 40


def test_what_was_exceeded_is_said_with_what_it_adds() -> None:
    samples = answer()["samples"]
    samples.append([500, 1, 20 * MIB, 5 * MIB, True])
    text = shown(answer(samples=samples))
    assert "predictions exceeded: 1 of 41" in text
    assert "more since a prediction was exceeded" in text


def test_without_a_formula_it_says_what_is_missing() -> None:
    text = shown(answer(SAMPLES_MIN - 1))
    assert f"no formula before {SAMPLES_MIN}" in text
    text = shown(answer(0, model="lama", shape=""))
    assert "nothing is known of it; known are: llama" in text
    assert fit.as_values(answer(0))["formula"] is None


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    samples = answer()["samples"]
    samples.append([500, 1, 20 * MIB, 5 * MIB, True])
    for name, head in (("fit.png", b"\x89PNG"), ("fit.svg", b"<?xml")):
        fit.draw(answer(samples=samples), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    fit.draw(answer(samples=[[1, 1, 0, 0, True]] * SAMPLES_MIN), tmp_path / "fit.png")
    with pytest.raises(click.ClickException, match="no formula"):
        fit.draw(answer(1), tmp_path / "fit.svg")
    with pytest.raises(click.ClickException, match="cannot write"):
        fit.draw(answer(), tmp_path / "none" / "fit.svg")


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(click.ClickException, match=r"umad\[plots\]"):
        fit.draw(answer(), tmp_path / "fit.svg")


@pytest.mark.slow
def test_the_command_against_a_daemon(tmp_path: Path) -> None:
    with running(tmp_path) as daemon, Raw(daemon.socket) as peer:
        worker = peer.call("register", model="llama", quota=64 * MIB)["worker"]
        for tokens, rows, took, predicted, exact in answer()["samples"]:
            done = {"predicted": predicted, "peak": took, "tokens": tokens, "batch": rows}
            done |= {"worker": worker, "seconds": 0.1, "exact": exact}
            peer.socket.sendall(peer.wire.send_notification("forward_done", done))
        peer.call("ping")
        told = run("--socket", daemon.socket, "fit", "llama", "--json")
        assert told.returncode == 0, told.stderr
        values = json.loads(told.stdout)
        assert len(values["samples"]) == 40
        assert values["formula"]["per_token"] == pytest.approx(4096, rel=0.01)
        assert list(values["residuals"]) == ["0%", "25%", "50%", "75%", "98%", "100%"]
        drawn = run("--socket", daemon.socket, "fit", "llama", "--picture", tmp_path / "fit.svg")
        assert drawn.returncode == 0, drawn.stderr
        assert "40 forwards measured" in drawn.stdout
        assert (tmp_path / "fit.svg").is_file()
        wrong = run("--socket", daemon.socket, "fit", "llama", "--picture", "fit.txt")
        assert wrong.returncode == 2
        assert ".svg or .png" in wrong.stderr
        wrong = run("--socket", daemon.socket, "fit", "no model")
        assert "cost: model" in wrong.stderr
