"""Measuring and privatising a real model."""

from pathlib import Path

import pytest

from umad.client import torch_hooks
from umad.client.memory import give_back


def rss_anon():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weights_become_memory_of_this_process(tmp_path):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, n_embd=512, n_layer=4, n_head=8, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    parameters = sum(p.nbytes for p in model.parameters())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        give_back()  # or the copies move into pages that are counted already
        before = rss_anon()
        copied = torch_hooks.privatise(model)
        grown = rss_anon() - before
        assert copied == pytest.approx(parameters, rel=0.02)
        assert grown == pytest.approx(copied, rel=0.05)
        assert torch.equal(model(tokens).logits, expected)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert torch_hooks.privatise(model) == 0
    assert torch_hooks.measure(model) == pytest.approx(parameters, rel=0.02)
