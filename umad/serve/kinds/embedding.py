"""Kind "embedding": a sentence-transformers checkpoint, one vector of length 1 for each text.

Job: ``texts``.  Result: ``vectors`` (one list of floats for each text), ``tokens`` (their sum).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from umad.core.batching import Bounds
from umad.errors import InvalidParams, ModelFailed
from umad.serve.kinds.base import RUN_BYTES, Cancelled, Job, Prepared, Result, Source, fused
from umad.serve.kinds.packing import Packing, packs

TEXTS_MAX: Final = 2048
CHARACTERS_PER_TOKEN_MAX: Final = 32
BATCH_TOKENS: Final = 8192  # texts go together while rows times the longest stay below this
SPECIAL_TOKENS: Final = 8  # what a tokenizer writes around a text, at most
CONTEXT_UNKNOWN: Final = 512
FLOAT_BYTES: Final = 8 + 24 + 4  # a list's slot, a Python float, the tensor's own


class EmbeddingRunner:
    """An encoder, its tokenizer, and how its tokens become one vector."""

    kind = "embedding"
    unit = 1

    def __init__(self, model: Any, tokenizer: Any, folder: Path, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._model = model
        self._tokenizer = tokenizer
        self._pooling = _pooling(folder)
        config = model.config
        stated = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        limits = (stated, config.max_position_embeddings, tokenizer.model_max_length)
        self._context = min([limit for limit in limits if limit] or [CONTEXT_UNKNOWN])
        self._prices = _prices(config, model.dtype.itemsize)
        self._packing = Packing(model) if packs(model) else None
        self.bounds = Bounds(padded=self._packing is None)

    @classmethod
    def load(cls, source: Source, resident: Any) -> "EmbeddingRunner":
        """Read it from its folder."""
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
        model = AutoModel.from_pretrained(source.path, **source.arguments).eval()
        return cls(model, tokenizer, Path(source.path), resident(model))

    def bytes_needed(self, job: Job) -> int:
        """The largest batch through one layer, and the vectors."""
        return self._bytes_for(self._sizes(job))

    def bytes_together(self, tokens: int, rows: int) -> int:
        """The same for rows of one length."""
        return self._bytes_for([tokens] * rows)

    def _bytes_for(self, sizes: list[int]) -> int:
        """Of texts of so many tokens."""
        held, square, vector = self._prices
        forward = max(rows * length * (held + length * square) for rows, length in _areas(sizes))
        return int(forward + len(sizes) * vector) + RUN_BYTES

    def size(self, job: Job) -> tuple[int, int]:
        """Of the largest batch: the padded length, and rows."""
        return _largest(self._sizes(job))

    def _sizes(self, job: Job) -> list[int]:
        """The most tokens that each text can become."""
        texts = _texts(job)
        return [min(len(item.encode()) + SPECIAL_TOKENS, self._context) for item in texts]

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Embed the texts, in batches of like length."""
        (result,) = self.run_together([self.prepare(job)], cancelled)
        return result

    def prepare(self, job: Job) -> Prepared:
        """Tokenise the texts; each must fit the context."""
        texts = _texts(job)
        most = CHARACTERS_PER_TOKEN_MAX * self._context
        for at, item in enumerate(texts):
            if len(item) > most:
                raise InvalidParams(
                    f"text {at} has {len(item)} characters; the model's context of "
                    f"{self._context} tokens takes {most} at most"
                )
        rows = self._tokenizer(texts, padding=False, truncation=False)["input_ids"]
        for at, row in enumerate(rows):
            if len(row) > self._context:
                raise InvalidParams(
                    f"text {at} has {len(row)} tokens; the model's context is {self._context}"
                )
        lengths = [len(row) for row in rows]
        return Prepared(max(lengths), len(rows), self._bytes_for(lengths), rows)

    def run_together(self, jobs: Sequence[Prepared], cancelled: Cancelled) -> list[Result]:
        """Embed the texts of all jobs, in batches of like length."""
        import torch

        rows: list[list[int]] = [row for job in jobs for row in job.inputs]
        vectors: list[list[float]] = [[]] * len(rows)
        for batch in _batches([len(row) for row in rows]):
            if cancelled():
                break
            with torch.inference_mode():
                found = self._embed([rows[at] for at in batch])
            for at, vector in zip(batch, found, strict=True):
                vectors[at] = vector
        results, rest = [], iter(vectors)
        for job in jobs:
            lengths = [len(row) for row in job.inputs]
            own = list(islice(rest, len(lengths)))
            data = {"vectors": own, "tokens": sum(lengths)}
            results.append(Result(data, _largest(lengths)))
        return results

    def _embed(self, rows: list[list[int]]) -> list[list[float]]:
        """Of texts, the longest first."""
        import torch

        if self._packing is not None:
            pooled = torch.cat([self._pool_whole(states) for states in self._packing.read(rows)])
        else:
            pooled = self._pool_padded(rows)
        vectors: list[list[float]] = torch.nn.functional.normalize(pooled.float()).tolist()
        return vectors

    def _pool_whole(self, states: Any) -> Any:
        """Of texts of one length: (texts, tokens, hidden) to (texts, hidden)."""
        if self._pooling == "mean":
            return states.mean(1)
        return states[:, 0 if self._pooling == "cls" else -1]

    def _pool_padded(self, rows: list[list[int]]) -> Any:
        """Of texts whose lengths differ: (texts, hidden)."""
        import torch

        inputs = self._tokenizer.pad(
            {"input_ids": rows}, return_tensors="pt", padding_side="right"
        ).to(self._model.device)
        states = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        if self._pooling == "mean":
            weights = mask.unsqueeze(-1).to(states.dtype)
            return (states * weights).sum(1) / weights.sum(1).clamp_min(1e-9)
        if self._pooling == "cls":
            return states[:, 0]
        places = torch.arange(len(rows), device=states.device)
        return states[places, mask.sum(1) - 1]


def _prices(config: Any, item: int) -> tuple[int, int, int]:
    """Bytes of a padded token, of each pair of a row's tokens, and of a vector.

    Asked once: a batch is priced again for each job that may join it, and in transformers a look
    at a configuration is a search, one at a model's type a walk over its parameters.

    Source: the tensors of transformers' encoder layers.  For each padded token residual, normed
    copy and its float32, queries, keys, values, output, and two of the inner size; a mask of
    tokens by tokens for each row, and the attention matrix where it is not fused.
    """
    heads = config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    held = item * (8 * config.hidden_size + 2 * inner) + 8 * config.hidden_size
    square = item + 1 + (0 if fused(config) else heads * (item + 8))
    return held, square, config.hidden_size * FLOAT_BYTES


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Places of texts, the longest first, grouped so that a batch stays below BATCH_TOKENS."""
    batch: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(at)
    yield batch


def _areas(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Rows and padded length of each batch."""
    for batch in _batches(sizes):
        yield len(batch), sizes[batch[0]]


def _largest(sizes: list[int]) -> tuple[int, int]:
    """Padded length and rows of the batch with the most padded tokens."""
    rows, length = max(_areas(sizes), key=lambda area: area[0] * area[1])
    return length, rows


def _texts(job: Job) -> list[str]:
    texts = job.get("texts")
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise InvalidParams("texts must be a list of texts")
    if not 1 <= len(texts) <= TEXTS_MAX:
        raise InvalidParams(f"texts has {len(texts)} items; from 1 to {TEXTS_MAX}")
    return texts


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _pooling(folder: Path) -> str:
    """How the checkpoint says that its tokens become one vector; the mean where it says nothing."""
    config = _read(folder / "1_Pooling" / "config.json")
    legacy = [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value
    ]
    mode = config.get("pooling_mode") or (legacy[0] if len(legacy) == 1 else legacy or "mean")
    if mode not in ("mean", "cls", "lasttoken"):
        raise ModelFailed(f"{folder} pools by {mode!r}; mean, cls and lasttoken are supported")
    return str(mode)
