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
