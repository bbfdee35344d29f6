"""The guard on against off: interleaved processes, medians of each process's medians.

"On" is as umad-serve runs: preloaded, attached, the thread in an account; "off" is the plain
process.  The loops allocate, write every byte and free, once through torch (a tensor) and once
through malloc.

What was expected before each step, and what came of it:

1. A lock and a search in a pool for each block >= 64 KiB, 60-100 ns together: 5-10 % of the 64 KiB
   loop through malloc (0.9 us), nothing elsewhere.  It came to 1 % there, within the noise: glibc
   takes a lock and searches for blocks of that size, too.
2. Tensors below 16 KiB in slabs of the account, so that they are counted: a lock and a bit search
   against glibc's thread cache, +15 ns a tensor, 1 % of the tiniest forward (0.38 ms with some 150
   tensors).  It came out even: glibc's aligned allocation never uses its thread cache, and carves.
3. free() looks at the block's size word for the count of `shared` blocks, a cache line that glibc
   reads next anyway: nothing to see.  Nothing was seen.
4. Blocks >= 2 MiB on huge pages and a warm cache: first touches and translation misses go down,
   the batched forward and 16 MiB become a little faster than plain.  They did.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, ratio
from umad.guard import preload

ROOT = Path(__file__).parents[2]
ROUNDS = 9
TARGETS = {
    "batched forward (4x256 tokens) of a small Llama": 1.01,
    "generate (24 tokens) of a small Llama": 1.01,
    "the tiniest forward": 1.03,
    **{
        f"allocate-touch-free {size} {how}": 1.05
        for how in ("tensor", "malloc")
        for size in ("1 KiB", "64 KiB", "1 MiB", "16 MiB")
    },
}


def run() -> list[Figure]:
    preload.build()
    added, why = preload.launch_environment(os.environ)
    if why:
        raise SystemExit(f"guard: off, {why}")
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    on: list[dict[str, float]] = []
    off: list[dict[str, float]] = []
    for turn in range(ROUNDS):
        order = [(on, {**plain, **added}), (off, plain)]
        for results, env in order if turn % 2 else reversed(order):
            results.append(_child(env))
    return [
        ratio("guard_cost", name, [r[name] for r in on], [r[name] for r in off], target)
        for name, target in TARGETS.items()
    ]


def _child(env: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_guard_cost"],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _median_us(call: Callable[[], Any], calls: int, times: int) -> float:
    call()
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - before) / calls * 1e6)
    return statistics.median(taken)


def _measure() -> dict[str, float]:
    import ctypes

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from umad.guard import account
    from umad.guard.page import AccountPage

    if account.guard_state().active:
        page = AccountPage.create(1)
        account.attach(page.fd)
        page.open(0, 3 << 30)
        account.enter(0)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def llama(hidden: int, layers: int, words: int) -> Any:
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=hidden,
                intermediate_size=hidden * 8 // 3,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=words,
            )
        ).eval()

    small, tiny = llama(256, 4, 2048), llama(64, 2, 256)
    one, batch = torch.ones(1, 4, dtype=torch.long), torch.ones(4, 256, dtype=torch.long)
    prompt = batch[:1, :16]
    libc = ctypes.PyDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def generate() -> None:
        small.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )

    def tensor(size: int) -> None:
        torch.empty(size, dtype=torch.uint8).fill_(1)

    def block(size: int) -> None:
        at = libc.malloc(size)
        ctypes.memset(at, 1, size)
        libc.free(at)

    names = iter(TARGETS)
    with torch.inference_mode():
        result = {
            next(names): _median_us(lambda: small(batch), 2, 7),
            next(names): _median_us(generate, 1, 9),
            next(names): _median_us(lambda: tiny(one), 100, 25),
        }
        for touch in (tensor, block):
            for size, calls in ((1 << 10, 4000), (64 << 10, 2000), (1 << 20, 500), (16 << 20, 30)):
                result[next(names)] = _median_us(lambda t=touch, n=size: t(n), calls, 11)
    return result


if __name__ == "__main__":
    print(json.dumps(_measure()))
