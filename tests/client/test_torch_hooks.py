"""Measuring and privatising a real model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
