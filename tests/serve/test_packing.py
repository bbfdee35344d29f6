"""Texts in one row get the vectors that they get alone."""

from pathlib import Path
from typing import Any

import pytest

from umad.serve.kinds.embedding import EmbeddingRunner
from umad.serve.kinds.packing import Packing, packs

pytestmark = [pytest.mark.models, pytest.mark.slow]

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
FAMILIES = ("bert", "electra", "roberta", "xlm-roberta", "camembert")


def model(family: str, **more: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SMALL, **more)
    return AutoModel.from_config(config).eval()


def alone(family: str, tokens: list[int]) -> Any:
    """The last states of a text by itself, as transformers computes them."""
    import torch

    with torch.inference_mode():
        return model(family)(input_ids=torch.tensor([tokens])).last_hidden_state[0]


TEXTS = [[5, 7, 9, 4, 3, 2, 8, 11, 12], [60, 61, 62], [7, 70, 9], [3, 9, 99], [42]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_of_each_alone(family: str) -> None:
    import torch

    packed = model(family)
    assert packs(packed)
    with torch.inference_mode():
        groups = list(Packing(packed).read(TEXTS))
    assert [tuple(group.shape[:2]) for group in groups] == [(1, 9), (3, 3), (1, 1)]
    found = [states for group in groups for states in group]
    for tokens, states in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(states, alone(family, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooled_as_the_padded_ones_are(pooling: str, tmp_path: Path) -> None:
    """The same runner, before and after it was told to pad."""
    import json

    import torch

    class Tokenizer:
        model_max_length = 40

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [TEXTS[int(text)] for text in texts]}

        def pad(self, rows: dict[str, Any], **_: Any) -> Any:
            from transformers import BatchEncoding

            longest = max(map(len, rows["input_ids"]))
            ids = [row + [1] * (longest - len(row)) for row in rows["input_ids"]]
            mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows["input_ids"]]
            return BatchEncoding(
                {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            )

    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    asked = {"texts": ["3", "0", "1", "4", "2"]}
    found = []
    for packing in (True, False):
        its = model("bert")
        runner = EmbeddingRunner(its, Tokenizer(), tmp_path, 1)
        assert runner.bounds.padded is False
        if not packing:
            its.set_attn_implementation("sdpa")
            runner._packing = None
        found.append(runner.run(asked, lambda: False).data)
    packed, padded = found
    assert packed["tokens"] == padded["tokens"] == 19
    for one, other in zip(packed["vectors"], padded["vectors"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_others_are_padded() -> None:
    assert not packs(model("bert", is_decoder=True))
    assert not packs(model("mpnet"))
    assert not packs(model("bert").to("meta"))
