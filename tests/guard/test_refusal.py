"""Over the limit: torch's own error, in that thread alone."""

import pytest

from tests.guard.guarded import PRELUDE, TORCH, python

pytestmark = [pytest.mark.slow, pytest.mark.models]


def test_one_thread_is_refused_while_another_goes_on() -> None:
    code = """
page.open(0, 64 * MIB); page.open(1, 256 * MIB)
stop = threading.Event()
sums, errors = set(), []
def neighbour():
    with account(1):
        try:
            while not stop.is_set():
                sums.add(float(torch.ones(8 << 18).sum()))
        except BaseException as error:
            errors.append(repr(error))
thread = threading.Thread(target=neighbour); thread.start()
kinds, kept = [], []
for _ in range(200):
    with account(0):
        try:
            kept.append(torch.ones(5 << 18))
        except RuntimeError as error:
            kinds.append("can't allocate memory" in str(error))
            kept.clear()
with account(0):
    try: bytearray(100 * MIB)
    except MemoryError: kinds.append(True)
stop.set(); thread.join()
answer(refused=page.read(0).refused, kinds=kinds, sums=list(sums), errors=errors,
       other=page.read(1).refused, peak=page.read(0).peak, asked=page.read(0).requested)
"""
    got = python(code, prelude=TORCH)
    assert got["refused"] == len(got["kinds"]) > 10
    assert all(got["kinds"])
    assert got["sums"] == [float(8 << 18)]
    assert (got["errors"], got["other"]) == ([], 0)
    assert got["peak"] <= 64 << 20
    assert got["asked"] > 100 << 20


def test_a_slow_leak_of_small_tensors_ends_in_a_refusal() -> None:
    code = """
page.open(0, 32 * MIB)
kept = []
with account(0):
    try:
        while True: kept.append(torch.ones(200))
    except RuntimeError as error:
        text = str(error)
count = len(kept)
kept.clear(); trim(0)
answer(count=count, left=page.read(0).used, torch="can't allocate memory" in text)
"""
    got = python(code, prelude=TORCH)
    assert got["torch"]
    assert 30 << 20 < got["count"] * 832 <= 32 << 20
    assert got["left"] == 0


def test_lowering_a_limit_refuses_from_then_on() -> None:
    code = """
page.open(0, 256 * MIB)
ended = threading.Event()
def work():
    with account(0):
        try:
            while True: torch.ones(16 << 18).sum()
        except RuntimeError:
            ended.set()
thread = threading.Thread(target=work, daemon=True); thread.start()
threading.Event().wait(0.05)
start = time.perf_counter()
page.set_limit(0, 4 * MIB)
done = ended.wait(10)
answer(done=done, took=time.perf_counter() - start, used=page.read(0).used)
"""
    got = python(code, prelude=TORCH)
    assert got["done"]
    assert got["took"] < 1


def test_an_account_that_is_not_open_refuses_all() -> None:
    code = """
refused = []
for slot in (7, 8):
    if slot == 8: page.open(8, MIB); page.close_account(8)
    with account(slot):
        try: torch.ones(1 << 18)
        except RuntimeError: refused.append(slot)
        ok = [str(n) * 100 for n in range(1000)]  # small blocks still come
answer(refused=refused, current=current())
"""
    assert python(code, prelude=TORCH) == {"refused": [7, 8], "current": -1}


def test_torch_imported_inside_an_account_is_noticed() -> None:
    code = """
page.open(0, 1024 * MIB)
with account(0):
    import torch
    x = torch.ones(8 << 18)
where = account_range(0)
answer(inside=where.tensor_base <= x.data_ptr() < where.tensor_base + where.tensor_bytes)
"""
    assert python(code, prelude=PRELUDE)["inside"]


def test_random_quotas_and_closings_harm_nobody_else() -> None:
    """Real work under limits that bind anywhere in it: errors in that thread, nothing else."""
    code = """
import os, random
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(2)
seed, rounds = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
def llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, vocab_size=1024)).eval()
prompt = torch.arange(32).reshape(2, 16)
def write(model):
    with torch.inference_mode():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
                              min_new_tokens=12, do_sample=False, pad_token_id=0).tolist()
page.open(1, 1024 * MIB)
answers, errors, stop = [], [], threading.Event()
def neighbour():
    with account(1):
        try:
            model = llama()
            while not stop.is_set(): answers.append(write(model))
        except BaseException as error: errors.append(repr(error))
beside = threading.Thread(target=neighbour, daemon=True); beside.start()
sort = lambda: torch.sort(torch.rand(1 << 21))
jobs = [
    lambda: write(llama()),
    lambda: torch.linalg.svd(torch.rand(300, 300)),
    lambda: torch.fft.fft2(torch.rand(16, 256, 256)),
    lambda: torch.nn.functional.conv2d(torch.rand(4, 16, 128, 128), torch.rand(32, 16, 3, 3)),
    sort,
    lambda: [torch.rand(1 << 16) for _ in range(300)],
]
outcomes = {"done": 0, "memory": 0, "other": []}
def victim(job):
    with account(0):
        try:
            for _ in range(3): job()
            outcomes["done"] += 1
        except (RuntimeError, MemoryError) as error:
            known = "memory" in str(error).lower() or "alloc" in str(error).lower()
            if known or isinstance(error, MemoryError): outcomes["memory"] += 1
            else: outcomes["other"].append(str(error)[:200])
for _ in range(rounds):
    quota = int(2 ** chance.uniform(16, 28))
    page.open(0, quota)
    job = chance.choice(jobs)
    thread = threading.Thread(target=victim, args=(job,), daemon=True)
    thread.start()
    # A sort whose data turn to zeros may never end; test_return.py has it.
    if chance.random() < 0.3 and job is not sort:
        thread.join(chance.uniform(0, 0.2)); page.close_account(0)
    thread.join(60)
    assert not thread.is_alive()
    trim(0); page.close_account(0); page.free(0)
stop.set(); beside.join(60)
answer(**outcomes, distinct=len({str(a) for a in answers}), count=len(answers), errors=errors,
       refused=page.read(1).refused)
"""
    got = python(code, "1", "40", prelude=TORCH)
    assert got["errors"] == []
    assert got["refused"] == 0
    assert got["count"] > 3
    assert got["distinct"] == 1
    assert got["memory"] > 5
    assert got["done"] > 5
