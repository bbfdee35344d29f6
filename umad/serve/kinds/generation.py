"""Answers that grow together: sequences join and leave a running batch between two steps.

A step is one forward over the newest tokens of all sequences, packed in one row: what the weights
do they do for all of them at once, while attention looks at each sequence's own keys and values
alone.  So nothing is padded, a sequence's bytes are its own, and its answer is the one it would
get alone, but for what half precision rounds in another order.  A prompt is read in parts of
``PREFILL_TOKENS``, so that one long prompt does not hold up those that are answering.

transformers has this too (``generate_batch``).  Source: our measurement, 2 cores, a Llama of four
layers, 16 prompts of 16 new tokens: 8.3 requests/s one by one, 0.4 with it, since its cache is
sized by the machine and it is made for GPUs; and it has no seed for each request.

What was read of a prompt can be copied into another that begins with the same tokens: all joining
models have a cache of keys and values alone, each of which follows from the tokens before it.

Owns ``Packed``, the caches, and which models can be asked so.  Stays out: texts and sampling, and
what is kept for others (``prefixes``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

ATTENTION: Final = "umad_packed"
PREFILL_TOKENS: Final = 512  # of all prompts, in one step
CHUNK_TOKENS: Final = 32  # a cache has room for so many to come; it is charged from then on
BLOCK_TOKENS: Final = 32  # what was read of a prompt is kept in blocks of so many
# Decoders with plain attention and a cache of keys and values alone.
FAMILIES: Final = frozenset(
    {"granite", "llama", "ministral", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
# Their frequencies follow the longest of what is read at once, which is not the sequence's own.
_ROPES_THAT_LOOK: Final = frozenset({"dynamic", "longrope"})
# What a checkpoint may ask of generation beside this, nobody here does.
_KNOWN: Final = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "do_sample",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "num_beams",
        "pad_token_id",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "transformers_version",
        "use_cache",
    }
)


def joins(model: Any) -> bool:
    """Whether a model's answers can grow together; it attends to packed rows from here on.

    Those that cannot are asked one by one.
    """
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    asked = {
        name
        for name, value in model.generation_config.to_diff_dict().items()
        if value is not None and value is not False
    }
    if (
        config.model_type not in FAMILIES
        or rope.get("rope_type") in _ROPES_THAT_LOOK
        or not asked <= _KNOWN
    ):
        return False
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    model.set_attn_implementation(ATTENTION)
    return True


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer: the prompt and what came after it, ``most`` tokens in the end.

    ``pick`` takes the scores of the next token (1, vocabulary) float32 and gives the token's;
    None: the likeliest.
    """

    tokens: list[int]
    most: int
    pick: Callable[[list[int], "torch.Tensor"], "torch.Tensor"] | None = None
    read: int = 0  # of its tokens, how many are in the cache
    recalled: int = 0  # and how many of these others had read
    drawn: int | None = None  # the next token, where it was chosen in a step that failed then
    cache: "dict[int, torch.Tensor]" = field(default_factory=dict)  # by layer

    def forget(self) -> None:
        """Let go of all that was read of it; it will be read again."""
        self.cache.clear()
        self.read = self.recalled = 0


@dataclass(slots=True)
class _Part:
    """A sequence's tokens of one step: where they lie in the packed row."""

    sequence: Sequence
    at: int
    count: int


class Packed:
    """One forward over several sequences.

    Args:
        model: one that ``joins`` said yes of.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._kept = (getattr(config, "num_key_value_heads", None) or heads), size
        self._layers = range(config.num_hidden_layers)

    def step(
        self,
        sequences: list[Sequence],
        recall: "Callable[[Sequence], list[torch.Tensor]]" = lambda _: [],
    ) -> list[Sequence]:
        """Read on in each sequence, and append the next token to those that are read to the end.

        Args:
            sequences: those that grow.
            recall: what others have read of one of which nothing is read yet, as blocks; asked
                right before that begins.

        Returns:
            The latter.
        """
        import torch

        parts = list(self._parts(sequences, recall))
        ids = [
            token
            for part in parts
            for token in part.sequence.tokens[part.sequence.read :][: part.count]
        ]
        places = [part.sequence.read + offset for part in parts for offset in range(part.count)]
        whole = [
            part for part in parts if part.sequence.read + part.count == len(part.sequence.tokens)
        ]
        device = self._model.device
        # One at least: a model wants something to make logits of.
        keep = [part.at + part.count - 1 for part in whole] or [0]
        logits = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([places], device=device),
            logits_to_keep=torch.tensor(keep, device=device),
            use_cache=False,
            umad_parts=parts,
        ).logits[0]
        scores = logits.to(torch.float32, copy=True)
        _pick([part.sequence for part in whole], scores)
        chosen = scores.argmax(-1).tolist()
        # Nothing fails from here on: a step is done for all of its sequences, or for none.
        for part in parts:
            part.sequence.read += part.count
        for part, token in zip(whole, chosen, strict=False):
            part.sequence.tokens.append(token)
            part.sequence.drawn = None
        return [part.sequence for part in whole]

    def _parts(
        self, sequences: list[Sequence], recall: "Callable[[Sequence], list[torch.Tensor]]"
    ) -> Iterator[_Part]:
        at, room = 0, PREFILL_TOKENS
        for sequence in sequences:
            if not sequence.read and room and (blocks := recall(sequence)):
                self._recall(sequence, blocks)
            left = len(sequence.tokens) - sequence.read
            count = left if left == 1 else min(left, room)  # those that answer are never held up
            if count:
                self._make_room(sequence, sequence.read + count)
                yield _Part(sequence, at, count)
                at += count
                room -= count if left > 1 else 0

    def _recall(self, sequence: Sequence, blocks: "list[torch.Tensor]") -> None:
        """Begin a sequence with copies of the blocks that it begins with; there is one at least."""
        import torch

        read = len(blocks) * BLOCK_TOKENS
        self._make_room(sequence, read)
        for layer, held in sequence.cache.items():
            torch.cat([block[layer] for block in blocks], dim=2, out=held[:, :, :read])
        # All of it is there: one that was refused in between has read nothing.
        sequence.read = sequence.recalled = read

    def _make_room(self, sequence: Sequence, tokens: int) -> None:
        """Let its cache hold so many tokens, and some to come.

        Not in the midst of a forward: what lives on among its passing tensors pins the memory
        between, a huge page each.

        Shapes: of a layer (2, kv_heads, tokens, size), keys and values.
        """
        import torch

        kv_heads, size = self._kept
        most = min(sequence.most, len(sequence.tokens) + CHUNK_TOKENS)
        whole = -(-max(tokens, most) // CHUNK_TOKENS) * CHUNK_TOKENS
        for layer in self._layers:
            held = sequence.cache.get(layer)
            if held is not None and held.shape[2] >= tokens:
                continue
            grown = torch.empty(
                (2, kv_heads, whole, size), dtype=self._model.dtype, device=self._model.device
            )
            if held is not None:
                grown[:, :, : sequence.read] = held[:, :, : sequence.read]
            sequence.cache[layer] = grown


def _pick(sequences: list[Sequence], scores: "torch.Tensor") -> None:
    """Make the chosen token of each the likeliest; ``scores`` has a row for each.

    By chance, each token is drawn once: where one fails, the others keep what they have drawn.
    """
    for row, sequence in enumerate(sequences):
        if sequence.pick is None:
            continue
        if sequence.drawn is not None:
            scores[row, sequence.drawn] = float("inf")
            continue
        try:
            scores[row] = sequence.pick(sequence.tokens, scores[row : row + 1])[0]
        except BaseException:
            for before, done in enumerate(sequences[:row]):
                if done.pick is not None and done.drawn is None:
                    done.drawn = int(scores[before].argmax())
            raise


def block_bytes(sequence: Sequence) -> int:
    """What a block of its keys and values takes, of all layers."""
    return sum(held.nbytes // held.shape[2] for held in sequence.cache.values()) * BLOCK_TOKENS


def block_of(sequence: Sequence, at: int) -> "torch.Tensor":
    """A copy of the keys and values of one block, which are read.

    They follow from the tokens up to there alone, windows included, so they are the same in every
    sequence that begins alike.

    Shapes: the result is (layers, 2, kv_heads, BLOCK_TOKENS, size).
    """
    import torch

    held = [sequence.cache[layer] for layer in sorted(sequence.cache)]
    return torch.stack([one[:, :, at : at + BLOCK_TOKENS] for one in held])


def _no_mask(*_: Any, **__: Any) -> None:
    """Each part knows whom it may look at."""


def _attention(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: Any,  # transformers' signature
    umad_parts: list[_Part],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> "tuple[torch.Tensor, None]":
    """Attention of each part over its own sequence.

    Shapes: query (1, heads, tokens, size), key and value (1, kv_heads, tokens, size); the result
    is (1, tokens, heads, size).
    """
    import torch

    found = [
        _attend(
            query[:, :, part.at : part.at + part.count],
            *_remember(
                part.sequence,
                module.layer_idx,
                key[0, :, part.at : part.at + part.count],
                value[0, :, part.at : part.at + part.count],
            ),
            scaling,
            sliding_window,
        )
        for part in umad_parts
    ]
    return torch.cat(found, dim=1), None


def _remember(
    sequence: Sequence, layer: int, key: "torch.Tensor", value: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Add keys and values (kv_heads, tokens, size) to the cache; all of them, as views."""
    import torch

    end = sequence.read + key.shape[1]
    held = sequence.cache[layer]
    torch.stack((key, value), out=held[:, :, sequence.read : end])
    return held[0, :, :end], held[1, :, :end]


def _attend(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    scaling: float | None,
    window: int | None,
) -> "torch.Tensor":
    """Shapes: query (1, heads, new, size), key and value (kv_heads, all, size)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    _, heads, new, size = query.shape
    kv_heads, whole, _ = key.shape
    group = heads // kv_heads
    if new == 1:
        # Its heads that share keys go as rows of one head: nothing is spread, nothing is masked.
        if window is not None:
            key, value = key[:, -window:], value[:, -window:]
        alone = query.reshape(1, kv_heads, group, size)
        found = scaled_dot_product_attention(alone, key[None], value[None], scale=scaling)
        return found.reshape(1, 1, heads, size)
    if group > 1:
        key, value = (one.repeat_interleave(group, dim=0) for one in (key, value))
    mask = None
    if new < whole or (window is not None and window < whole):
        place = torch.arange(whole, device=query.device)
        own = place[-new:, None]
        mask = place <= own
        if window is not None:
            mask &= place > own - window
    found = scaled_dot_product_attention(
        query, key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return found.transpose(1, 2)
