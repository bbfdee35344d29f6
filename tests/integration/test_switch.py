"""Two models that do not fit beside each other: called in turns, moved by people, reconfigured."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import ROOT, eventually
from tests.demo import ask
from tests.integration.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.models]
TWO = {"llama": "1600MiB", "qwen": "1600MiB"}  # of 4 GiB, less 1 GiB for the engine itself
MORE = 'wait_max = "4s"\n[leases]\nresidence_min = "0s"\nrival_rest = "0s"\n'


def umadctl(made: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umad.cli.main", "--socket", str(made.socket), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def chat(made: Stack, model: str) -> ask.Answer:
    return ask.post(
        made.address,
        "/v1/chat/completions",
        model=model,
        messages=[{"role": "user", "content": "What does a ledger do?"}],
        max_tokens=4,
        temperature=0,
    )


def states(made: Stack) -> dict[str, str]:
    return {one["name"]: one["state"] for one in made.status()["workers"]}


def front(made: Stack) -> dict[str, Any]:
    return dict(ask.get(made.address, "/status").body)


def switch(made: Stack, model: str) -> None:
    """Called by many at once: it is loaded once, and the other one has gone for it."""
    before = len([one for one in made.log() if one.get("event") == "model.ready"])
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: chat(made, model), range(4)))
    assert [answer.status for answer in answers] == [200] * 4, answers
    ready = [one for one in made.log() if one.get("event") == "model.ready"]
    assert [one["model"].split("/")[0] for one in ready[before:]] == [model]
    (other,) = TWO.keys() - {model}
    assert states(made)[other] == "cold"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_models_go_for_each_other(folder: Path, isolation: str) -> None:
    made = Stack(folder, TWO, MORE)
    made.config.write_text(
        made.config.read_text().replace("kind = ", f'isolation = "{isolation}"\nkind = ')
    )
    made.start()
    try:
        made.wait_ready()
        eventually(lambda: states(made).get("llama") == "ready", 30)
        switch(made, "qwen")
        switch(made, "llama")
        if isolation == "thread":
            people_have_their_say(made)
            a_new_configuration(made)
        else:
            made.kill("engine")
            eventually(lambda: ask.get(made.address, "/readyz").status == 503, 10)
            made.wait_ready()
            switch(made, "qwen")
        assert all(one.get("event") != "failed" for one in made.log())
    except BaseException:
        print("\n".join((folder / "log").read_text(errors="replace").splitlines()[-60:]))
        raise
    finally:
        made.stop()


def people_have_their_say(made: Stack) -> None:
    """Llama is loaded."""
    done = umadctl(made, "load", "qwen")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qwen: loaded, ")
    assert umadctl(made, "pin", "qwen").stdout == "qwen: pinned; it never goes for another model\n"
    refused = chat(made, "llama")
    assert refused.status == 503
    assert refused.retry_after is not None
    assert refused.body["error"]["code"] == "quota_denied"
    assert "qwen" in refused.body["error"]["message"]
    assert umadctl(made, "evict", "qwen").returncode == 1
    assert umadctl(made, "unpin", "qwen").returncode == 0
    gone = umadctl(made, "evict", "qwen")
    assert (gone.stdout, gone.stderr) == ("qwen: unloaded, its memory is back\n", "")
    assert umadctl(made, "drain").returncode == 0
    eventually(lambda: front(made)["models"]["llama"]["state"] == "cold", 10)
    drained = chat(made, "llama")
    assert (drained.status, drained.body["error"]["code"]) == (503, "drained")
    assert umadctl(made, "resume", "--json").stdout == '{"drained": false}\n'
    eventually(lambda: front(made)["models"]["llama"]["state"] == "cold", 10)
    assert chat(made, "llama").status == 200
    assert json.loads(umadctl(made, "set-quota", "llama", "1700MiB", "--json").stdout) == {
        "quota": 1700 << 20
    }


def a_new_configuration(made: Stack) -> None:
    engine = made.pid("engine")
    good = made.config.read_text()
    made.config.write_text(good + "nonsense = 1\n")
    refused = umadctl(made, "reload")
    assert refused.returncode == 78
    assert "unknown key" in refused.stderr
    assert chat(made, "llama").status == 200
    without = good[: good.index('[[model]]\nname = "qwen"')]
    made.config.write_text(without.replace("4s", "5s"))
    done = umadctl(made, "reload")
    assert (done.returncode, done.stderr) == (0, "")
    assert "serve.wait_max" in done.stdout
    eventually(lambda: list(front(made)["models"]) == ["llama"], 10)
    eventually(lambda: list(states(made)) == ["runtime", "llama"], 10)
    assert chat(made, "llama").status == 200
    assert chat(made, "qwen").status == 404
    made.config.write_text(good)
    assert umadctl(made, "reload").returncode == 0
    eventually(lambda: "qwen" in front(made)["models"], 10)
    eventually(lambda: front(made)["models"]["qwen"]["state"] == "cold", 15)
    switch(made, "qwen")
    assert made.pid("engine") == engine  # nothing was restarted for any of it
