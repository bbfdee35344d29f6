"""Texts for an encoder, one after the other in one row, so that none is padded.

What the weights do they do for each token of the row alone; attention looks at each text by
itself, those of one length together.  A text's vectors are the ones it would get alone.  Only on
a CPU: a GPU would rather pad than be called for each length.  Source: our measurement, MiniLM,
one thread, 32 texts of which each fifth is ten times as long: 154 texts/s, padded 39.

Owns which models can be asked so, and how.  Stays out: tokenizers, and what becomes of the states.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

ATTENTION: Final = "umad_texts"
# Encoders with plain attention and learnt places; of the latter the first one of a text.
_PLAIN: Final = frozenset({"bert", "electra"})
_BEHIND_PADDING: Final = frozenset({"camembert", "roberta", "xlm-roberta"})


class Packing:
    """Asks a model so; it attends to texts in a row from here on.

    Args:
        model: one that ``packs`` said yes of.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, _no_mask)
        model.set_attn_implementation(ATTENTION)
        config = model.config
        self._model = model
        self._first = config.pad_token_id + 1 if config.model_type in _BEHIND_PADDING else 0

    def read(self, rows: Sequence[list[int]]) -> "Iterator[torch.Tensor]":
        """The last states of texts, for those of one length together.

        Args:
            rows: the texts' tokens, the longest text first.

        Returns:
            Tensors (texts, tokens, hidden) in the order of ``rows``.
        """
        import torch

        groups = [
            (len(list(same)), length) for length, same in groupby(len(tokens) for tokens in rows)
        ]
        places = [self._first + place for tokens in rows for place in range(len(tokens))]
        states = self._model(
            input_ids=torch.tensor([[token for tokens in rows for token in tokens]]),
            position_ids=torch.tensor([places]),
            umad_groups=groups,
        ).last_hidden_state[0]
        return _cut(states, 0, groups)


def packs(model: Any) -> bool:
    """Whether a model's texts can go in one row."""
    config = model.config
    return (
        model.device.type == "cpu"
        and config.model_type in _PLAIN | _BEHIND_PADDING
        and not config.is_decoder
        and getattr(config, "position_embedding_type", None) in (None, "absolute")
    )


def _cut(
    packed: "torch.Tensor", dim: int, groups: Sequence[tuple[int, int]]
) -> "Iterator[torch.Tensor]":
    """(..., all tokens, ...) as (..., texts, tokens of each, ...) for each length."""
    at = 0
    for texts, tokens in groups:
        part = packed.narrow(dim, at, texts * tokens)
        yield part.unflatten(dim, (texts, tokens))  # type: ignore[no-untyped-call]
        at += texts * tokens


def _no_mask(*_: Any, **__: Any) -> None:
    """Each text knows whom it may look at: all of itself."""


def _attention(
    _module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: Any,  # transformers' signature
    umad_groups: list[tuple[int, int]],
    scaling: float | None = None,
    **_: Any,
) -> "tuple[torch.Tensor, None]":
    """Attention of each text to itself.

    Shapes: query, key and value (1, heads, tokens, size); the result is (1, tokens, heads, size).
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    found = []
    for three in zip(*(_cut(one[0], 1, umad_groups) for one in (query, key, value)), strict=True):
        # (heads, texts, tokens, size): the texts are the batch.
        q, k, v = (one.transpose(0, 1) for one in three)
        states = scaled_dot_product_attention(q, k, v, scale=scaling)
        found.append(states.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[None], None
