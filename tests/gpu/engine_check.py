"""A real daemon and a real engine with a small Llama on the GPU, under quotas; for device_checks.

It loads and answers in a thread and in a process of its own, a copy with too small a quota is
refused, and what the driver says of the card says that all bytes are back.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.daemon.running import Daemon
from tests.gpu.device_checks import driver_used
from umad.guard import preload
from umad.serve.supervisor import engine_environment

MIB = 1 << 20
WEIGHTS_MIB = 360
WITHIN_S = 120
ROOT = Path(__file__).parents[2]
NEEDED = ("accelerate", "diffusers", "msgpack", "starlette", "structlog", "transformers", "uvicorn")
JOB = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def missing() -> list[str]:
    """Packages that an engine needs and this machine lacks."""
    return [name for name in NEEDED if find_spec(name) is None]


def figures(device: str, used: Callable[[], int] = driver_used) -> dict[str, Any]:
    """Run all of it; ``device`` is torch's name, ``used`` the bytes of the card in use."""
    preload.build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _build(folder / "llama")
        daemon = Daemon(folder, text=_config(folder, device)).start()
        try:
            before = used()
            served = asyncio.run(_serve(folder))
            left = used() - before
            unloaded = _unload(folder, device)
        finally:
            daemon.stop()
    return {
        **served,
        **unloaded,
        "left_after_the_engine_bytes": left,
        "ok": bool(served["ok"] and unloaded["ok"] and left <= 8 * MIB),
    }


def _build(folder: Path) -> None:
    """A Llama of 16 layers in bfloat16, its weights made up."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.demo.words import CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(CHAT_TEMPLATE, 2048)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(folder: Path, device: str) -> str:
    models = {
        "llama": 'quota = "1GiB"\npriority = 2',
        "tight": 'quota = "128MiB"\npriority = 1',
        "alone": 'quota = "1GiB"\nisolation = "process"',
    }
    head = f"""
[daemon]
socket = "{folder}/umad.sock"
group = "root"
admin_group = "root"
[memory]
reserve = "64MiB"
budget = "12GiB"
[serve]
runtime_quota = "4GiB"
guard = "required"
"""
    return head + "".join(
        f'[[model]]\nname = "{name}"\nkind = "chat"\npath = "{folder}/llama"\n'
        f'device = "{device}"\n{keys}\n'
        for name, keys in models.items()
    )


async def _serve(folder: Path) -> dict[str, Any]:
    from tests.serve.processes import engine_process
    from tests.serve.standin import until

    config = folder / "umad.toml"
    command = [sys.executable, "-m", "umad.serve.engine", f"--config={config}"]
    command += ["--log-format=json", f"--parent={os.getpid()}"]
    async with engine_process(config, command) as engine:
        told = engine.link.status
        began_s = time.monotonic()
        with suppress(TimeoutError):  # then what it said last is among the figures
            await until(
                lambda: (
                    [told(one)["state"] for one in ("llama", "alone", "tight")]
                    == ["ready", "ready", "failed"]
                ),
                WITHIN_S,
            )
        ready_s = time.monotonic() - began_s
        states = {name: told(name) for name in ("llama", "alone", "tight")}
        tokens = {}
        for name in ("llama", "alone"):
            if states[name]["state"] == "ready":
                tokens[name] = (await engine.run(name, WITHIN_S, **JOB))["completion_tokens"]
        refused = (states["tight"]["error"] or {}).get("code")
        await engine.link.stop(10)
        await engine.process.wait()
    kept = [line for line in engine.log if "model.device_bytes_left" in line]
    quotas = {name: states[name]["device_quota"] for name in ("llama", "alone")}
    return {
        "ok": len(tokens) == 2
        and min(tokens.values()) >= 1
        and set(quotas.values()) == {"on"}
        and refused == "quota_exceeded"
        and not kept,
        "ready_s": round(ready_s, 2),
        "answered_tokens": tokens,
        "device_quota": quotas,
        "tight": str(states["tight"]["error"])[:300],
        "states": {name: (one["state"], str(one["error"])[:200]) for name, one in states.items()},
        "kept": kept[:2],
    }


def _unload(folder: Path, device: str) -> dict[str, Any]:
    """Two lives of a model in one guarded process: its bytes go while the process stays."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine_check", str(folder), device],
        cwd=ROOT,
        env=engine_environment(os.environ, "required"),
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * WITHIN_S,
    )
    if done.returncode != 0:
        return {"ok": False, "stderr": done.stderr[-600:]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    (first, second), weights = said["lives"], WEIGHTS_MIB * MIB
    return {
        # What the first life left are kernels that the driver loaded, which the second has too.
        "ok": second["after"] - first["after"] <= 0.02 * weights
        and second["loaded"] - second["after"] >= 0.98 * weights,
        **said,
    }


def main(folder: Path, device: str, used: Callable[[], int] = driver_used) -> None:
    """Load, answer and unload twice in this process, which has the guard preloaded."""
    from umad.client import connect
    from umad.serve import libraries
    from umad.serve.jobs import Job, JobQueue
    from umad.serve.link import ModelState
    from umad.serve.worker import ModelThread
    from umad.settings import ModelSettings

    load = libraries.bring()
    path = str(folder / "llama")
    model = ModelSettings(name="again", kind="chat", path=path, quota=1 << 30, device=device)
    lives: list[dict[str, Any]] = []
    states: list[ModelState] = []
    with connect(str(folder / "umad.sock")) as client:
        for _ in range(2):
            queue = JobQueue(model.name)
            thread = ModelThread(
                client,
                model,
                0,
                queue,
                load,
                lambda _model, _instance, state: states.append(state),
                lambda: os._exit(70),
                guard="required",
            )
            thread.start()
            thread.settled.wait(WITHIN_S)
            answered = threading.Event()
            answers: list[Any] = []

            def reply(result: Any, error: Any, answers: Any = answers, end: Any = answered) -> None:
                answers.append(error or result["completion_tokens"])
                end.set()

            queue.put(Job("one", JOB, time.monotonic() + WITHIN_S, reply))
            answered.wait(WITHIN_S)
            loaded = used()
            thread.stop()
            thread.join(WITHIN_S)
            lives.append({"answer": answers, "loaded": loaded, "after": used()})
    last = next((state for state in reversed(states) if state.state == "ready"), states[-1])
    print(json.dumps({"lives": lives, "state": [last.state, last.device_quota, str(last.error)]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
