"""Five small models as threads of one process and as processes, through the whole product.

python -m tests.bench isolation; or this module itself, for the table of both.
"""

import os
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.bench.figures import Figure
from tests.daemon.running import eventually
from tests.demo import ask
from tests.demo.fixtures import checkpoints
from tests.integration.stack import Stack
from umad.units import MIB

MODELS = ("one", "two", "three", "four", "five")
ROUNDS = 6
LOAD_S = 3.0
TOKENS = 32
KILLS = 3
ISOLATIONS = ("thread", "process")


@dataclass
class Seen:
    """What one of the two showed, in order."""

    ready_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    gone_ms: list[float] = field(default_factory=list)


def run() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        small = Path(folder) / "small"
        make_small(small)
        for size, checkpoint in (("tiny", checkpoints() / "llama"), ("small", small)):
            seen = {isolation: Seen() for isolation in ISOLATIONS}
            _measure(Path(folder), size, checkpoint, seen)
            figures += _figures(size, seen["thread"], seen["process"])
    return figures


def _figures(size: str, threads: Seen, processes: Seen) -> list[Figure]:
    """Processes against threads of the same run; for rates more is better, else less."""
    return [
        _figure(size, name, unit, getattr(processes, key), getattr(threads, key), factor, more=more)
        for name, unit, key, factor, more in (
            ("answers of all five under load", "1/s", "together_s", 1.0, True),
            ("answers of one alone", "1/s", "alone_s", 0.9, True),
            ("memory of all but the front (PSS)", "MiB", "memory_mib", 2.0, False),
            ("start to all ready", "s", "ready_s", 1.25, False),
            ("one model from its start to ready", "s", "loaded_s", 1.0, False),
            ("SIGKILL to gone: one model, or all threads", "ms", "gone_ms", 1.0, False),
        )
    ]


def _figure(
    size: str,
    name: str,
    unit: str,
    ours: list[float],
    theirs: list[float],
    factor: float,
    *,
    more: bool,
) -> Figure:
    value, rival = statistics.median(ours), statistics.median(theirs)
    return Figure(
        "isolation",
        f"{size}: {name}, processes; rival: threads",
        value,
        unit,
        f"{'>=' if more else '<='} {factor:g} x threads",
        rival,
        len(ours),
        min(ours),
        max(ours),
        value >= factor * rival if more else value <= factor * rival,
    )


def _measure(folder: Path, size: str, checkpoint: Path, seen: dict[str, Seen]) -> None:
    """Both run side by side and are asked in turn, so that what else runs here hits both."""
    with ExitStack() as stack:
        running = {}
        for isolation in ISOLATIONS:
            own = folder / f"{size}-{isolation}"
            own.mkdir()
            started, ready_s = stack.enter_context(_running(own, checkpoint, isolation))
            running[isolation] = started
            seen[isolation].ready_s.append(ready_s)
            _answers(started, MODELS, 1.0)  # the first ones import and compile
        for _ in range(ROUNDS):
            for isolation in ISOLATIONS:
                alone_s = _answers(running[isolation], MODELS[:1], LOAD_S / 2)
                seen[isolation].alone_s.append(alone_s)
            for isolation in ISOLATIONS:
                together_s = _answers(running[isolation], MODELS, LOAD_S)
                seen[isolation].together_s.append(together_s)
        for isolation in ISOLATIONS:
            found = seen[isolation]
            found.memory_mib.append(_memory(running[isolation]) / MIB)
            found.loaded_s += _loaded_s(running[isolation])
            found.gone_ms += [1000 * _kill(running[isolation]) for _ in range(KILLS)]


@contextmanager
def _running(folder: Path, checkpoint: Path, isolation: str) -> Iterator[tuple[Stack, float]]:
    stack = Stack(folder, {})
    models = "".join(
        f'[[model]]\nname = "{name}"\nkind = "chat"\nquota = "384MiB"\n'
        f'path = "{checkpoint}"\nisolation = "{isolation}"\n'
        for name in MODELS
    )
    stack.config.write_text(stack.config.read_text() + models)
    began_s = time.perf_counter()
    stack.start()
    try:
        stack.wait_ready()
        yield stack, time.perf_counter() - began_s
    finally:
        stack.stop()


def _answers(running: Stack, models: tuple[str, ...], within_s: float) -> float:
    """Answers a second, one client for each model."""
    counts = dict.fromkeys(models, 0)
    end_s = time.perf_counter() + within_s

    def keep_asking(model: str) -> None:
        while time.perf_counter() < end_s:
            answer = ask.chat(running.address, model, "Tell me about the harbour.", TOKENS)
            assert answer.status == 200, ask.gist(answer)
            counts[model] += 1

    threads = [threading.Thread(target=keep_asking, args=(model,)) for model in models]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts.values()) / (time.perf_counter() - began_s)


def _memory(running: Stack) -> int:
    """Each page of the engine and what it started once, shared ones by their share."""
    engine = psutil.Process(running.pid("engine"))
    processes = [engine, *engine.children(recursive=True)]
    return sum(int(one.memory_full_info().pss) for one in processes)


def _loaded_s(running: Stack) -> list[float]:
    """From a worker's start to its model's being ready, as the log has it."""
    return [line["seconds"] for line in running.log() if line.get("event") == "model.ready"]


def _kill(running: Stack) -> float:
    """Kill what holds the first model; returns the seconds until it was gone."""
    name = MODELS[0]
    worker = eventually(lambda: _ready_worker(running, name), within_s=120)
    pidfd = os.pidfd_open(worker["pid"])
    try:
        began_s = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], 10)
        return time.perf_counter() - began_s
    finally:
        os.close(pidfd)


def _ready_worker(running: Stack, name: str) -> dict[str, Any] | None:
    for worker in running.status()["workers"]:
        if (
            worker["name"] == name
            and worker["state"] == "ready"
            and psutil.pid_exists(worker["pid"])
        ):
            found: dict[str, Any] = worker
            return found
    return None


def make_small(folder: Path) -> None:
    """A Llama of about 100 MiB in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.demo.words import CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(CHAT_TEMPLATE, 2048)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print("| five models on all cores | threads | processes | unit |\n|---|---|---|---|")
    for figure in run():
        name = figure.figure.removesuffix(", processes; rival: threads")
        print(f"| {name} | {figure.rival:.3g} | {figure.value:.3g} | {figure.unit} |")
