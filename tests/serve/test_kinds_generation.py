"""Answers that grow together are the ones that each would get alone."""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.demo.fixtures import checkpoints, peak_bytes, runner
from umad.errors import InvalidParams
from umad.serve.kinds import generation
from umad.serve.kinds.answers import Answers, Asked
from umad.serve.kinds.base import Prepared, Result
from umad.serve.kinds.telling import Teller
from umad.serve.kinds.text import TextRunner

pytestmark = [pytest.mark.models, pytest.mark.slow]
WORDS = "the captain paints a boat and sails to the harbour before noon".split()  # noqa: SIM905


def never() -> bool:
    return False


def jobs(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Prompts of many lengths; some drawn, some the likeliest, some with a stop."""
    chance = random.Random(seed)
    return [
        {
            "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 16))),
            "max_tokens": chance.randint(1, 12),
            "temperature": chance.choice([0.0, 0.0, 0.8]),
            "top_p": chance.choice([1.0, 0.9]),
            "seed": number,
            "stop": [chance.choice(["e", "harbour", "zz"])] if number % 3 == 0 else [],
        }
        for number in range(count)
    ]


def grown(
    talk: TextRunner, wanted: list[dict[str, Any]], chance: random.Random
) -> list[dict[str, Any]]:
    """Let them join at steps by chance, a few leave for good, and a few give way to others."""
    answers = talk.generation()
    names: dict[object, int] = {}
    done: dict[int, Result] = {}
    waiting = list(enumerate(wanted))
    lost: list[object] = []
    while waiting or names:
        while waiting and (not names or chance.random() < 0.3):
            number, job = waiting.pop(0)
            names[answers.join(talk.prepare(job), never, None)] = number
            if chance.random() < 0.2:  # somebody else comes, too, and hangs up soon
                lost.append(answers.join(talk.prepare(job), never, None))
        if lost and chance.random() < 0.4:
            answers.leave(lost.pop())
        if names and chance.random() < 0.2:
            answers.set_aside(chance.choice(list(names)))
        for name, result in answers.step():
            if name in names:
                done[names.pop(name)] = result
            else:
                lost.remove(name)
    return [done[number].data for number in range(len(wanted))]


@contextmanager
def read_in_parts_of(tokens: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "PREFILL_TOKENS", tokens)
        patch.setattr(generation, "CHUNK_TOKENS", 8)
        yield


def as_transformers_does(talk: TextRunner) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The same answers by ``generate`` and its own attention, one by one."""

    def ask(job: dict[str, Any]) -> dict[str, Any]:
        import torch

        model = talk._model
        model.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                return talk._generate(talk._encode(job), job, never, None).data
        finally:
            model.set_attn_implementation(generation.ATTENTION)

    return ask


@pytest.mark.parametrize("prefill", [512, 5])
def test_each_answer_is_the_one_it_gets_alone(prefill: int) -> None:
    talk = runner("chat", "llama")
    assert talk.joins
    wanted = jobs(9)
    alone = list(map(as_transformers_does(talk), wanted))
    assert len({answer["text"] for answer in alone}) > 6
    with read_in_parts_of(prefill):
        assert grown(talk, wanted, random.Random(prefill)) == alone
    assert [talk.run(job, never).data for job in wanted] == alone


def test_what_is_let_go_of_is_gone_at_once() -> None:
    """No cycle holds the model until the collector comes: an unload gives its bytes back."""
    talk = runner("chat", "llama")
    answers = talk.generation()
    for wanted in jobs(2):
        answers.join(talk.prepare(wanted), never, None)
    answers.step()
    answers.keep(1 << 30)
    there = weakref.ref(answers)
    gc.disable()
    try:
        del answers
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows_and_penalties_are_those_of_the_model(family: str) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints() / "llama")
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": 9,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen2":
        sizes |= {"use_sliding_window": True, "max_window_layers": 1}
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.repetition_penalty = 1.3
    talk = TextRunner(model, tokenizer, 0)
    assert generation.joins(model)
    talk.joins = True
    wanted = jobs(6, seed=9)
    alone = list(map(as_transformers_does(talk), wanted))
    with read_in_parts_of(7):
        assert grown(talk, wanted, random.Random(1)) == alone


def test_models_that_would_answer_otherwise_are_asked_one_by_one() -> None:
    import torch
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    llama = transformers.LlamaConfig(**sizes, **heads)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama)
    model.generation_config.no_repeat_ngram_size = 2
    assert not generation.joins(model)
    model = transformers.LlamaForCausalLM(llama)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not generation.joins(model)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    assert not generation.joins(gpt)
    assert gpt.config._attn_implementation != generation.ATTENTION
    assert not runner("vision").joins


def test_one_that_fails_changes_nothing_for_the_others() -> None:
    talk = runner("chat", "llama")
    wanted = [{**job, "max_tokens": 8, "temperature": 0.0} for job in jobs(3)]
    alone = [talk.run(job, never).data for job in wanted]
    answers = talk.generation()
    names = [answers.join(talk.prepare(job), never, None) for job in wanted]
    answers.step()

    def broken(_tokens: list[int], _scores: Any) -> Any:
        raise RecursionError

    culprit = talk.prepare({"prompt": "x", "max_tokens": 5})
    asked = culprit.inputs
    bad = type(asked)(asked.prompt, asked.new, asked.stops, broken)
    last = answers.join(Prepared(1, 1, 1, bad), never, None)
    done: dict[object, Result] = {}
    with pytest.raises(RecursionError):
        answers.step()
    for name in names:
        done.update(answers.step([name]))
    with pytest.raises(RecursionError):
        answers.step([last])
    answers.leave(last)
    while answers.size()[1]:
        done.update(answers.step())
    assert [done[name].data for name in names] == alone


@pytest.mark.usefixtures("short_blocks")
def test_a_step_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it is refused, while others and what is kept of prompts are there."""
    import torch

    talk = runner("chat", "llama")
    wanted = [{**job, "max_tokens": 12} for job in jobs(4)]
    alone = [talk.run(job, never).data for job in wanted]
    chance = random.Random(4)
    refusals = 0
    empty = torch.empty

    def refusing(*sizes: Any, **how: Any) -> Any:
        nonlocal refusals
        if chance.random() < 0.5:
            refusals += 1
            raise MemoryError
        return empty(*sizes, **how)

    answers = talk.generation()
    for _ in range(2):
        names = [answers.join(talk.prepare(job), never, None) for job in wanted]
        done: dict[object, Result] = {}
        with monkeypatch.context() as patch, read_in_parts_of(20):
            patch.setattr(torch, "empty", refusing)
            while len(done) < len(names):
                with contextlib.suppress(MemoryError):
                    done.update(answers.step())
                answers.keep(1 << 20)
        for name, expected in zip(names, alone, strict=True):
            found = done[name].data
            assert {**found, "cached_tokens": 0} == {**expected, "cached_tokens": 0}
    assert refusals > 10


def test_by_chance_each_token_is_drawn_once_whatever_fails() -> None:
    talk = runner("chat", "llama")
    wanted = [{"prompt": "the boat", "max_tokens": 9, "seed": seed} for seed in (3, 4, 5)]
    alone = [talk.run(job, never).data for job in wanted]
    answers = talk.generation()
    names = [answers.join(talk.prepare(job), never, None) for job in wanted]
    picks = {name: name.pick for name in names}
    done: dict[object, Result] = {}
    for failing in (names[1], names[2], names[0], names[2], names[1]):

        def broken(_tokens: list[int], _scores: Any) -> Any:
            raise MemoryError

        failing.pick = broken
        with pytest.raises(MemoryError):
            answers.step()
        failing.pick = picks[failing]
        if failing is names[2]:  # those before it go on without it
            done.update(answers.step(names[:2]))
            done.update(answers.step(names[2:]))
        else:
            done.update(answers.step())
    while answers.size()[1]:
        done.update(answers.step())
    assert [done[name].data for name in names] == alone


def test_who_has_left_ends_at_the_next_step() -> None:
    talk = runner("chat", "llama")
    answers: Answers = talk.generation()
    gone = False
    job = talk.prepare({"prompt": "the captain", "max_tokens": 100, "temperature": 0.0})
    answers.join(job, lambda: gone, None)
    assert answers.step() == []
    gone = True
    ((_, result),) = answers.step()
    assert result.data["completion_tokens"] == 2
    assert answers.size() == (0, 0)


def test_a_job_that_cannot_be_is_refused_before_it_joins() -> None:
    talk = runner("chat", "llama")
    for change, said in [
        ({"prompt": ""}, "prompt is empty"),
        ({"stop": [""]}, "stop"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": "1" * 3000}, "2048"),
    ]:
        with pytest.raises(InvalidParams, match=said):
            talk.prepare({"prompt": "x", "max_tokens": 3, **change})


# --- telling -------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are bytes of UTF-8; 256 is special and says nothing."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def told(data: bytes | list[int], *stops: str) -> tuple[list[str], str, bool]:
    pieces: list[str] = []
    teller = Teller(Letters(), list(stops), pieces.append)
    stopped = any(teller.add(token) for token in data)
    return pieces, teller.finish(), stopped


@pytest.mark.parametrize("text", ["plain", "größer – 日本語 🚢!", "a\u0301b", ""])
def test_only_whole_characters_are_told(text: str) -> None:
    pieces, whole, stopped = told(text.encode())
    assert (whole, "".join(pieces), stopped) == (text, text, False)
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(text)


def test_bytes_that_are_no_character_are_told_all_the_same() -> None:
    pieces, whole, _ = told(b"ab\xff\xff\xff\xff\xff\xff\xff\xff\xffc\xe6")
    assert "".join(pieces) == whole
    assert whole.startswith("ab\ufffd")
    assert whole.endswith("c\ufffd")
    assert told([97, *[256] * 20, 98])[1] == "ab"


def test_no_part_of_a_stop_is_told() -> None:
    pieces, whole, stopped = told(b"one two three", "two t", "never")
    assert (pieces, whole, stopped) == (["o", "ne "], "one ", True)
    pieces, whole, stopped = told(b"one two", "two three")
    assert (whole, stopped) == ("one two", False)
    assert pieces == ["o", "n", "e", " ", "two"]
    assert told(b"aab", "ab")[1] == "a"


def test_together_they_hold_no_more_than_each_was_given() -> None:
    talk = runner("chat", "llama")
    read = [talk.prepare({"prompt": "captain " * 60, "max_tokens": 4, "seed": 1})] * 6
    answers = talk.generation()

    def grow() -> None:
        for job in read:
            answers.join(job, never, None)
        while answers.size()[1]:
            answers.step()

    assert peak_bytes(grow) <= sum(job.bytes_needed for job in read)


# --- what was read of prompts ------------------------------------------------------------------

BLOCK = 8


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And one thread: so small a model only waits for a second one."""
    import torch

    monkeypatch.setattr(generation, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(family: str) -> Any:
    """A model of a family by chance; the windows of those that can have one are short."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": 11,
        "pad_token_id": 0,
    }
    if family.startswith("qwen"):
        sizes |= {"use_sliding_window": True, "max_window_layers": 1}
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert generation.joins(model)
    return model


class Tokens:
    """Jobs in tokens, for a model of its own; ``scores`` are all that its answers chose by."""

    def __init__(self, model: Any) -> None:
        self.answers = Answers(model, Letters(), [], lambda read, prompt: 1000 * read + prompt)
        self.scores: list[Any] = []

    def job(self, prompt: list[int], new: int = 5) -> Prepared:
        def pick(_tokens: list[int], scores: Any) -> Any:
            self.scores.append(scores.clone())
            return scores

        return Prepared(len(prompt) + new, 1, 1, Asked(prompt, new, [], pick))

    def ask(self, prompt: list[int], new: int = 5) -> dict[str, Any]:
        """Its answer, alone; what it reads of the prompt is kept by step."""
        self.scores.clear()
        self.answers.join(self.job(prompt, new), never, None)
        self.read = self.spared = 0
        while not (done := self.answers.step()):
            self.keep()
        self.keep()
        return done[0][1].data

    def keep(self, most: int = 1 << 20) -> None:
        self.read += self.answers.fresh
        self.spared = max(self.spared, self.answers.spared_bytes)
        self.answers.keep(most)


@pytest.mark.parametrize("family", sorted(generation.FAMILIES))
@pytest.mark.usefixtures("short_blocks")
def test_who_begins_like_another_reads_only_the_rest(family: str) -> None:
    import torch

    model = small(family)
    chance = random.Random(family)
    beginning = chance.choices(range(1, 64), k=43)
    prompts = [beginning + chance.choices(range(1, 64), k=9) for _ in range(3)]
    prompts += [prompts[0], prompts[0][: 5 * BLOCK], beginning[:20]]
    shared, fed = Tokens(model), []
    model.register_forward_pre_hook(
        lambda _module, _args, given: fed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    cached, spared = [], []
    for prompt in prompts:
        alone = Tokens(model)
        wanted = alone.ask(prompt)
        fed.clear()
        answer = shared.ask(prompt)
        cached.append(answer["cached_tokens"])
        spared.append(shared.spared)
        # All that it was not spared, and each token of the answer but the last.
        assert sum(fed) == len(prompt) - cached[-1] + 4
        assert shared.read == len(prompt) - cached[-1]
        assert answer == wanted | {"cached_tokens": cached[-1]}
        torch.testing.assert_close(shared.scores, alone.scores)
    # The last token of a prompt is read by each.
    assert cached == [0, 40, 40, 48, 32, 16]
    # Of a step that reads 20 tokens, of these prompts.
    assert spared == [0, 8052, 8052, 16052, 12040, 16020]


@pytest.mark.usefixtures("short_blocks")
def test_those_that_join_together_read_what_they_share_once() -> None:
    model = small("llama")
    prompts = [[*range(1, 41), 50 + number] for number in range(6)]
    alone = [Tokens(model).ask(prompt)["text"] for prompt in prompts]
    shared = Tokens(model)
    shared.read = shared.spared = 0
    names = [shared.answers.join(shared.job(prompt), never, None) for prompt in prompts]
    shared.answers.leave(names.pop())
    done: dict[object, Result] = {}
    while shared.answers.size()[1]:
        done.update(shared.answers.step())
        shared.keep()
    assert [done[name].data["text"] for name in names] == alone[:5]
    assert shared.read < 2 * 41
    assert done[names[-1]].data["cached_tokens"] == 40


@pytest.mark.usefixtures("short_blocks")
def test_what_is_kept_stays_within_its_bytes_and_takes_them() -> None:
    talk = Tokens(small("llama"))
    block = 4 * 2 * 2 * BLOCK * 8 * 4  # layers, keys and values, heads, tokens, size, float32
    talk.ask(list(range(1, 60)))
    assert talk.answers.kept_bytes == 7 * block
    kept = talk.answers._prefixes.find(range(1, 60))
    assert sum(one.untyped_storage().nbytes() for one in kept) == 7 * block
    talk.answers.shrink(3 * block + 5)
    assert talk.answers.kept_bytes == 3 * block
    talk.keep(block)
    assert talk.answers.kept_bytes == block
    talk.answers.shrink(0)
    assert talk.answers.kept_bytes == 0
    assert talk.ask(list(range(1, 60)))["cached_tokens"] == 0
