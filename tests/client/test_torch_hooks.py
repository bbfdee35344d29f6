"""Measuring and privatising a real model."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from umad.client import torch_hooks
from umad.client.interrupt import Stopped
from umad.client.mapped import MappedFiles, Source

ROOT = Path(__file__).parents[2]
# In a process of its own: what other tests gave back to the heap would be filled meanwhile.
PRIVATISE = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from umad.client import torch_hooks
from umad.client.memory import give_back

def rss_anon():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

folder = sys.argv[1]
config = GPT2Config(vocab_size=8000, n_embd=512, n_layer=4, n_head=8, n_positions=64)
GPT2LMHeadModel(config).save_pretrained(folder)
model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
parameters = sum(p.nbytes for p in model.parameters())
tokens = torch.arange(16)[None]
with torch.no_grad():
    expected = model(tokens).logits
    give_back()  # or the copies move into pages that are counted already
    before = rss_anon()
    copied = torch_hooks.privatise(model)
    grown = rss_anon() - before
    same = torch.equal(model(tokens).logits, expected)
tied = model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
again, measured = torch_hooks.privatise(model), torch_hooks.measure(model)
print(json.dumps([parameters, copied, grown, same, tied, again, measured]))
"""


@pytest.mark.models
@pytest.mark.slow
def test_weights_become_memory_of_this_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PRIVATISE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    parameters, copied, grown, same, tied, again, measured = answer
    assert copied == pytest.approx(parameters, rel=0.02)
    assert grown == pytest.approx(copied, rel=0.05)
    assert same, "the model answers as before"
    assert tied
    assert again == 0
    assert measured == pytest.approx(parameters, rel=0.02)


@pytest.mark.models
@pytest.mark.slow
def test_what_was_changed_in_a_mapping_stays_changed(tmp_path):
    """A loader may write into the mapped weights; the file knows nothing of that."""
    import torch

    from umad.client.torch_hooks import privatise

    file = tmp_path / "weights"
    torch.arange(3000.0).numpy().tofile(file)
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=12000)
    flat = torch.empty(0).set_(storage, 0, (3000,))
    module = torch.nn.Module()
    module.written, module.turned = (
        torch.nn.Parameter(one)
        for one in (flat[:1000].view(10, 100), flat[2000:].view(10, 100).t())
    )
    with torch.no_grad():
        module.written[0, 5] = -1.0
    expected = [module.written.clone(), module.turned.clone()]
    assert privatise(module) == 8000
    del flat, storage
    file.write_bytes(bytes(12000))
    assert torch.equal(module.written, expected[0])
    assert torch.equal(module.turned, expected[1])
    assert module.written[0, 5] == -1.0
    assert privatise(module) == 0


def checkpoint(tmp_path, *sizes):
    """A module of float tensors that lie in a mapped file: 0, 1, 2 and so on."""
    import torch

    file = tmp_path / "weights"
    torch.arange(float(sum(sizes))).numpy().tofile(file)
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=4 * sum(sizes))
    module = torch.nn.Module()
    parts = torch.empty(0).set_(storage, 0, (sum(sizes),)).split(sizes)
    module.weights = torch.nn.ParameterList(torch.nn.Parameter(one) for one in parts)
    mapping = MappedFiles().at(storage.data_ptr())
    if mapping is None or mapping.device != file.stat().st_dev:
        pytest.skip("mappings show another device here (btrfs, overlayfs)")
    return module


class Readers:
    """The one reader of a load, which waits for ``gate`` in each part; what it has read."""

    def __init__(self, monkeypatch):
        self.gate, self.begun, self.read = threading.Event(), threading.Event(), []
        real, readers = Source.read, self

        def read(self, to):
            readers.begun.set()
            assert readers.gate.wait(60)
            try:
                real(self, to)
                readers.read.append(ctypes.string_at(to, self.size))
            except OSError as error:
                readers.read.append(error)

        monkeypatch.setattr(Source, "read", read)
        monkeypatch.setattr(torch_hooks, "READERS", 1)
        monkeypatch.setattr(torch_hooks, "PART_BYTES", 4096)


@pytest.mark.models
@pytest.mark.slow
def test_what_is_queued_is_not_read_for_a_load_that_has_failed(tmp_path, monkeypatch):
    import torch

    module, readers = checkpoint(tmp_path, 102400, 1), Readers(monkeypatch)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            readers.gate.set()
            super().shutdown(wait=wait)

    def empty_like(tensor, **options):
        if tensor.numel() == 1:
            assert readers.begun.wait(60)
            raise MemoryError
        return real(tensor, **options)

    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch_hooks, "ThreadPoolExecutor", Pool)
    with pytest.raises(MemoryError):
        torch_hooks.privatise(module)
    assert len(readers.read) == 1, "the one that was on its way, of a hundred"


@pytest.mark.models
@pytest.mark.slow
def test_memory_and_file_outlive_the_last_read_whatever_ends_the_load(tmp_path, monkeypatch):
    """The revocation can arrive while the load waits for its readers to end."""
    import torch

    module, readers = checkpoint(tmp_path, 1024, 1), Readers(monkeypatch)
    expected = torch.arange(1024.0).numpy().tobytes()
    copies, threads = [], []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **_):
            super().shutdown(wait=False)
            threads.extend(self._threads)
            raise Stopped

    def empty_like(tensor, **options):
        if tensor.numel() == 1:
            raise Stopped
        made = real(tensor, **options)
        copies.append(weakref.ref(made))
        return made

    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch_hooks, "ThreadPoolExecutor", Pool)
    with pytest.raises(Stopped):
        torch_hooks.privatise(module)
    del module
    gc.collect()
    assert readers.begun.wait(60)
    assert copies[0]() is not None
    assert times_open(tmp_path / "weights") == 1
    readers.gate.set()
    for thread in threads:
        thread.join(60)
    assert readers.read == [expected]
    gc.collect()
    assert copies[0]() is None
    assert times_open(tmp_path / "weights") == 0


def times_open(file):
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link) == str(file) for link in links)
