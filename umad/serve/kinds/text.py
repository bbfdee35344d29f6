"""Kind "chat": a causal language model.

Job: ``messages`` (list of ``{"role", "content"}``) or ``prompt``, ``max_tokens``, and where they
are wanted ``temperature``, ``top_p``, ``seed``, ``stop``.
Result: ``text``, ``prompt_tokens`` and of these ``cached_tokens`` (they were read for others
before), ``completion_tokens``, ``finish_reason`` ("stop", "length").
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from umad.errors import InvalidParams, ModelFailed
from umad.serve.kinds import generation
from umad.serve.kinds.answers import Answers, Asked, answer_of
from umad.serve.kinds.base import (
    RUN_BYTES,
    Cancelled,
    Emit,
    Job,
    Prepared,
    Result,
    Source,
    fused,
    generator,
    number,
    read,
    text,
    whole,
)
from umad.serve.kinds.telling import Teller

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
STOPS_MAX: Final = 16
MESSAGES_MAX: Final = 4096
MESSAGE_TOKENS: Final = 16  # what a chat template writes around one message, at most
CHARACTERS_PER_TOKEN_MAX: Final = 32  # a longer prompt is refused before it is tokenised
CONTEXT_UNKNOWN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """The figures of config.json that decide what a forward pass of a decoder takes.

    ``prefill``: so many tokens of a prompt are read at once; None: all.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    item_bytes: int
    fused: bool
    all_logits: bool
    prefill: int | None = None

    @classmethod
    def of(cls, model: Any) -> "Shape":
        """Read them from a model's configuration."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        experts = getattr(config, "num_experts_per_tok", None) or 1
        expert = getattr(config, "moe_intermediate_size", None) or inner
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=max(inner, experts * expert if experts > 1 else inner),
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            context=getattr(config, "max_position_embeddings", None) or CONTEXT_UNKNOWN,
            item_bytes=model.dtype.itemsize,
            fused=fused(config),
            all_logits="logits_to_keep" not in inspect.signature(model.forward).parameters,
        )

    def bytes_needed(self, prompt: int, new: int) -> int:
        """KV cache, activations of the prefill, and logits of one row.

        Args:
            prompt: tokens of the prompt, at most.
            new: tokens to generate, at most.

        Source: the tensors of transformers' decoder layers.  Cache: 2 (keys and values) for each
        layer; one layer is held twice while a token is joined to it, and spread from kv_heads to
        heads for attention.  Prefill, for each token: residual, normed copy and its float32, the
        queries and the attention's output, gate, up and their product; and where it is read in
        parts a mask over all before, as bool and as floats.  Logits: float32, and for
        top_p sorted with their places, summed and masked.
        """
        tokens = prompt + new
        width = self.heads * self.head_dim
        cache = 2 * self.kv_heads * self.head_dim * self.item_bytes * tokens
        spread = 2 * width * self.item_bytes * tokens
        read = self.reading_bytes(prompt if self.prefill is None else self.prefill, prompt)
        matrix = 0 if self.fused else self.heads * prompt * tokens * (self.item_bytes + 8)
        rows = prompt if self.all_logits else 1
        logits = self.vocabulary * (48 + rows * (self.item_bytes + 4))
        return cache * (self.layers + 1) + spread + read + matrix + logits + RUN_BYTES

    def reading_bytes(self, read: int, prompt: int) -> int:
        """Of these, what is held only to read so many tokens of the prompt at once."""
        read = min(read, prompt)
        width = self.heads * self.head_dim
        held = self.item_bytes * (4 * self.hidden + 3 * width + 3 * self.inner) + 8 * self.hidden
        mask = prompt * (1 + self.item_bytes) if read < prompt else 0
        return read * (held + mask)


class TextRunner:
    """A causal language model and its tokenizer."""

    kind = "chat"
    joins = False

    def __init__(self, model: Any, tokenizer: Any, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._model = model
        self._tokenizer = tokenizer
        self._template = tokenizer
        self._shape = Shape.of(model)
        # Chance is ours (_processors), so transformers is told to take the likeliest token.
        self._config = copy.deepcopy(model.generation_config)
        self._top_k = self._config.top_k if self._config.do_sample else None
        self._config.update(
            do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, max_length=None
        )
        if self._config.pad_token_id is None:
            ends = self._ends()
            self._config.pad_token_id = ends[0] if ends else 0

    @classmethod
    def load(cls, source: Source, resident: Any) -> "TextRunner":
        """Read it from its folder."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        config = AutoConfig.from_pretrained(source.path, local_files_only=True)
        if config.is_encoder_decoder:
            raise ModelFailed(f"{source.path} is an encoder and a decoder, no chat model")
        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
        model = read(AutoModelForCausalLM, source, config=config)
        runner = cls(model, tokenizer, resident(model))
        if not runner._shape.all_logits and generation.joins(model):
            runner.joins = True
            runner._shape = replace(runner._shape, prefill=generation.PREFILL_TOKENS)
        return runner

    def bytes_needed(self, job: Job) -> int:
        """See ``Shape.bytes_needed``; a token holds at least one byte of the prompt."""
        return self._bytes_for(text_bytes(job), job)

    def size(self, job: Job) -> tuple[int, int]:
        """Prompt and answer.  The prompt is counted: it has several times as many bytes."""
        bare = job.get("messages") is not None
        prompt = self._tokenizer(self._prompt(job), add_special_tokens=not bare)["input_ids"]
        return self._tokens_for(len(prompt), job), self._rows(job)

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Generate one answer."""
        return self.run_telling(job, cancelled, None)

    def run_telling(self, job: Job, cancelled: Cancelled, emit: Emit | None) -> Result:
        """Generate one answer, and tell it as it grows."""
        import torch

        if self.joins:
            return self._join_alone(job, cancelled, emit)
        with torch.inference_mode():
            return self._generate(self._encode(job), job, cancelled, emit)

    def prepare(self, job: Job) -> Prepared:
        """Tokenise the prompt, and check all that the job asks for."""
        bare = job.get("messages") is not None
        prompt = self._tokenizer(self._prompt(job), add_special_tokens=not bare)["input_ids"]
        new = self._new_tokens(len(prompt), job)
        asked = Asked(prompt, new, _stops(job), self._picks(job))
        needed = self._shape.bytes_needed(len(prompt), new)
        return Prepared(len(prompt) + new, 1, needed, asked)

    def generation(self) -> Answers:
        """Answers that grow together; for a runner that ``joins``."""
        reading = self._shape.reading_bytes
        return Answers(self._model, self._tokenizer, self._ends(), reading)

    def _join_alone(self, job: Job, cancelled: Cancelled, emit: Emit | None) -> Result:
        answers = self.generation()
        answers.join(self.prepare(job), cancelled, emit)
        while not (ended := answers.step()):
            pass
        return ended[0][1]

    def _bytes_for(self, prompt: int, job: Job) -> int:
        prompt = min(prompt, self._shape.context)
        return self._shape.bytes_needed(prompt, self._tokens_for(prompt, job) - prompt)

    def _tokens_for(self, prompt: int, job: Job) -> int:
        """Of a prompt of so many tokens and its answer, at most."""
        return min(prompt + whole(job, "max_tokens", 1, 1 << 31), self._shape.context + 1)

    def _encode(self, job: Job) -> Any:
        prompt = self._prompt(job)
        # A template writes the special tokens itself.
        bare = job.get("messages") is not None
        return self._tokenizer(
            prompt,
            add_special_tokens=not bare,
            return_token_type_ids=False,  # some tokenizers give them, no causal model takes them
            return_tensors="pt",
        )

    def _prompt(self, job: Job) -> str:
        import jinja2

        if job.get("messages") is None:
            prompt = text(job, "prompt")
        elif not self._template.chat_template:
            raise InvalidParams("this model has no chat template; send it a plain prompt")
        else:
            messages = [self._message(item) for item in messages_of(job)]
            try:
                prompt = self._template.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except jinja2.TemplateError as error:
                raise InvalidParams(f"the chat template refuses the messages: {error}") from error
        most = CHARACTERS_PER_TOKEN_MAX * self._shape.context
        if not prompt:
            raise InvalidParams("the prompt is empty")
        if len(prompt) > most:
            raise InvalidParams(
                f"the prompt has {len(prompt)} characters; the model's context of "
                f"{self._shape.context} tokens takes {most} at most"
            )
        return prompt

    def _message(self, item: Any) -> dict[str, Any]:
        parts = parts_of(item)
        if any(part["type"] != "text" for part in parts):
            raise InvalidParams("this model reads text only, no images")
        return {"role": item["role"], "content": "".join(part["text"] for part in parts)}

    def _ends(self) -> list[int]:
        ends = self._config.eos_token_id
        return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]

    def _new_tokens(self, prompt: int, job: Job) -> int:
        """How many may follow a prompt of so many."""
        room = self._shape.context - prompt
        if room <= 0:
            raise InvalidParams(
                f"the prompt has {prompt} tokens; the model's context is {self._shape.context}, "
                "the answer included"
            )
        return min(whole(job, "max_tokens", 1, 1 << 31), room)

    def _generate(self, inputs: Any, job: Job, cancelled: Cancelled, emit: Emit | None) -> Result:
        prompt = inputs["input_ids"].shape[1]
        config = copy.copy(self._config)
        config.max_new_tokens = self._new_tokens(prompt, job)
        teller = Teller(self._tokenizer, _stops(job), emit)
        halt = _halt(teller, prompt, cancelled)
        output = self._model.generate(
            **inputs.to(self._model.device),
            generation_config=config,
            logits_processor=self._processors(job),
            stopping_criteria=[halt],
        )
        tokens = output[0, prompt:].tolist()
        stopped = cancelled() or tokens[-1] in self._ends()
        data = answer_of(teller, prompt, len(tokens), stopped=stopped)
        return Result(data, (prompt + len(tokens), self._rows(job)))

    def _rows(self, _job: Job) -> int:
        return 1

    def _processors(self, job: Job) -> list[Any]:
        """Sampling as processors, for a generator of our own.

        The largest of (logit − log of an exponential draw) is a draw from the softmax, so the
        greedy search of transformers samples.  Source: the Gumbel-max trick.
        """
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        temperature = number(job, "temperature", 0, 2, 1)
        top_p = number(job, "top_p", 0, 1, 1)
        source = generator(job, self._model.device)
        if temperature < 1e-3 or top_p == 0:
            return []

        def draw(_ids: Any, scores: Any) -> Any:
            import torch

            chance = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=source)
            # In its own memory: what was drawn is not lost for want of it.
            return chance.clamp_min_(torch.finfo(torch.float32).tiny).log_().neg_().add_(scores)

        chosen: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
        if self._top_k:
            chosen.append(TopKLogitsWarper(self._top_k))
        if top_p < 1:
            chosen.append(TopPLogitsWarper(top_p))
        return [*chosen, draw]

    def _picks(self, job: Job) -> "Callable[[list[int], Any], Any] | None":
        """The same for one of many sequences; None where the likeliest token is wanted."""
        import torch
        from transformers import RepetitionPenaltyLogitsProcessor

        chosen = self._processors(job)
        penalty = self._config.repetition_penalty
        if penalty is not None and penalty != 1:  # before all others, as transformers does
            chosen = [RepetitionPenaltyLogitsProcessor(penalty), *chosen]
        if not chosen:
            return None

        def pick(tokens: list[int], scores: Any) -> Any:
            ids = torch.tensor([tokens], device=scores.device)
            for process in chosen:
                scores = process(ids, scores)
            return scores

        return pick


def _halt(teller: Teller, prompt: int, cancelled: Cancelled) -> Any:
    """A stopping criterion: the job was cancelled, or a stop string ends in the newest token."""
    import torch

    told = prompt

    def halt(ids: Any, _scores: Any, **_: Any) -> Any:
        nonlocal told
        new, told = ids[0, told:].tolist(), ids.shape[1]
        ended = [teller.add(token) for token in new]
        return torch.full((ids.shape[0],), any(ended) or cancelled(), device=ids.device)

    return halt


def _stops(job: Job) -> list[str]:
    stops = job.get("stop") or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidParams("stop must be a list of texts that are not empty")
    if len(stops) > STOPS_MAX:
        raise InvalidParams(f"stop has {len(stops)} texts; {STOPS_MAX} at most")
    return stops


def messages_of(job: Job) -> list[Any]:
    """The job's messages, of a number that is allowed; each is checked by ``parts_of``."""
    messages = job.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParams("messages must be a list that is not empty")
    if len(messages) > MESSAGES_MAX:
        raise InvalidParams(f"messages has {len(messages)} items; {MESSAGES_MAX} at most")
    return messages


def parts_of(item: Any) -> list[dict[str, Any]]:
    """The content of one message as a list of parts, text or image, checked."""
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        role = item.get("role") if isinstance(item, dict) else item
        raise InvalidParams(f"unknown role {role!r}; use one of {', '.join(ROLES)}")
    content = item.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidParams("a message's content must be text or a list of parts")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        wanted = {"text": str, "image": bytes}.get(str(kind))
        if wanted is None or not isinstance(part.get(kind), wanted):
            raise InvalidParams(
                f"unknown part {kind!r} in a message; use text with text, or image with bytes"
            )
    return parts


def text_bytes(job: Job) -> int:
    """The most tokens that the job's text can become."""
    if job.get("messages") is None:
        return len(text(job, "prompt").encode()) + MESSAGE_TOKENS
    messages = messages_of(job)
    texts = (part["text"] for item in messages for part in parts_of(item) if part["type"] == "text")
    return sum(len(item.encode()) for item in texts) + MESSAGE_TOKENS * (len(messages) + 1)
