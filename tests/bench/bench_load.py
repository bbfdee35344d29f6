"""A load under umad against plain from_pretrained, both up to the first answer.

To the first answer, since from_pretrained only maps float32 weights: who reads them pays later.
Mapped weights are the kernel's cache, which no quota counts, so a load under umad copies them:
that copy is nearly all of the difference.  Once with the file in the page cache, and once without,
as when a model is loaded that was not in use: then the disk takes most of the time for both.

Prediction, before the first run of the second: reading 600 MiB at 1 GB/s takes 0.6 s for both, and
the copy of 0.25 s goes on while the kernel reads ahead: 1.2, where 1.5 is seen with a warm cache.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.engine import as_engine
from tests.bench.figures import Figure, ratio
from tests.daemon.running import CONFIG, Daemon

PAIRS = 9
JOB = {"prompt": "the harbour", "max_tokens": 2, "temperature": 0.0}


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        checkpoint = Path(folder) / "model"
        make(checkpoint)
        daemon = Daemon(
            Path(folder),
            text=CONFIG.format(socket=Path(folder) / "umad.sock", more="").replace("2GiB", "6GiB"),
        ).start()
        try:
            taken = as_engine(__name__, str(daemon.socket), str(checkpoint))
        finally:
            daemon.stop()
    what = "load and first answer under umad, over plain"
    return [
        ratio("load", f"{what}, file in the page cache", *taken["warm"], 1.05),
        ratio("load", f"{what}, file on the disk", *taken["cold"], 1.05),
    ]


def make(folder: Path) -> None:
    """A Llama of about 600 MiB in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.demo.words import CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(CHAT_TEMPLATE, 2048)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain(checkpoint: Path) -> None:
    """Load without umad, and answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.inference_mode():
        model.generate(**tokenizer(JOB["prompt"], return_tensors="pt"), max_new_tokens=2)


def forget(checkpoint: Path) -> None:
    """Drop the weights from the page cache."""
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _interleaved(socket: str, checkpoint: Path) -> dict[str, tuple[list[float], list[float]]]:
    import torch

    from umad.client import connect
    from umad.client.memory import settle
    from umad.serve.libraries import bring

    load = bring()
    torch.set_num_threads(2)

    with connect(socket) as client, client.worker("bench", quota="4GiB") as worker:
        assert worker.account is not None, "the guard is on, as in the engine"

        def under_umad() -> None:
            box = worker.load(
                lambda: [
                    load(
                        "chat",
                        str(checkpoint),
                        device="cpu",
                        dtype="auto",
                        progress=lambda _stage, _ratio: None,
                    )
                ]
            )
            with worker.forward(predicted=1):
                box[0].run(JOB, lambda: False)
            box.clear()
            worker.unload()

        def timed(work: object) -> float:
            gc.collect()
            before = time.perf_counter()
            work()  # type: ignore[operator]
            return time.perf_counter() - before

        timed(lambda: plain(checkpoint)), timed(under_umad)  # the first of each imports
        settle()  # as the engine does after its imports
        taken: dict[str, tuple[list[float], list[float]]] = {}
        for cache in ("warm", "cold"):
            ours, theirs = taken[cache] = [], []
            for _ in range(PAIRS):
                for work, times in ((lambda: plain(checkpoint), theirs), (under_umad, ours)):
                    if cache == "cold":
                        forget(checkpoint)
                    times.append(timed(work))
    return taken


if __name__ == "__main__":
    print(json.dumps(_interleaved(sys.argv[1], Path(sys.argv[2]))))
