"""Tokenizers for the small checkpoints, trained on sentences of our own.

The text is fixed and the training has no chance in it: the same code gives the same tokens.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

VOCABULARY: Final = 3000  # at most; our sentences give out before

PEOPLE = "the captain,a quiet nurse,our neighbour,the old baker,my sister,two pilots,the gardener"
DEEDS = "carries,paints,counts,repairs,remembers,borrows,sells,measures,cleans,hides"
THINGS = (
    "a wooden boat,seven apples,the broken clock,a letter from home,some warm bread,"
    "the blue bicycle,an empty glass,a heavy stone,the northern map,her winter coat"
)
PLACES = (
    "near the harbour,before sunrise,under the bridge,in a small kitchen,without a word,"
    "behind the station,while it rains,on the longest day,beside the river,after the concert"
)
TALK = (
    "What is the weather like today? It is cold, and the wind comes from the east.",
    "How many bytes does a page hold? Most often 4096, sometimes 65536.",
    "Please explain, step by step, why memory runs out when five models share it.",
    "Thank you! I would like to know more about the sea, the stars and the mountains.",
    "def add(left, right):\n    return left + right\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 40, 50, 100, 1000",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
IMAGE_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHAT_TOKENS = ["<s>", "<|end|>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]


def corpus() -> Iterator[str]:
    """Our own sentences: every mixture of the lists above, then the talk."""
    parts = (text.split(",") for text in (PEOPLE, DEEDS, THINGS, PLACES))
    for who, does, what, where in itertools.islice(itertools.product(*parts), 0, None, 3):
        yield f"{who.capitalize()} {does} {what} {where}."
    yield from TALK


def train(special: list[str], size: int = VOCABULARY) -> Any:
    """A byte-level BPE tokenizer; the special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def chat_tokenizer(template: str, length: int, *extra: str) -> Any:
    """The tokenizer of a language model, with its chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train([*CHAT_TOKENS, *extra]),
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=[*CHAT_TOKENS[3:], *extra],
        chat_template=template,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )


def clip_tokenizer() -> Any:
    """The tokenizer of CLIP's text encoders."""
    from transformers import CLIPTokenizer

    specials = ["<|startoftext|>", "<|endoftext|>"]
    state = json.loads(train(specials, 2000).to_str())["model"]
    # CLIP ends each word with </w>: its alphabet holds every byte both ways.
    alphabet = sorted(token for token in state["vocab"] if len(token) == 1)
    tokens = [*specials, *alphabet, *(letter + "</w>" for letter in alphabet)]
    merges: list[tuple[str, str]] = []
    for left, right in (tuple(pair) for pair in state["merges"]):
        if left.startswith("Ġ") or left + right in tokens:
            continue
        for joined in ((left, right), (left, right + "</w>")):
            if all(part in tokens for part in joined):
                merges.append(joined)
                tokens.append("".join(joined))
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def whisper_tokenizer(specials: list[str]) -> Any:
    """Whisper's tokenizer: text, then the special tokens as given, then the time stamps."""
    from transformers import WhisperTokenizer

    state = json.loads(train([]).to_str())["model"]
    tokenizer = WhisperTokenizer(
        vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]]
    )
    # In this order, and the time stamps last: Whisper's decoder counts on it.
    tokenizer.add_special_tokens({"additional_special_tokens": specials[1:]})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(1501)])
    return tokenizer
