"""Kind "speech": Whisper.

Job: ``audio`` (bytes of a WAV, FLAC, OGG or MP3 file), ``language`` ("en", "english", ...) or None
to let the model find it, ``segments``: true where they are wanted.
Result: ``text``, ``duration_s``, ``language`` ("english", ...) where it is known, and ``segments``
(maps, see ``_segment``): one of the whole file where the model says no times.
"""

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from umad.core.batching import Bounds
from umad.errors import InvalidParams
from umad.serve.kinds.base import (
    RUN_BYTES,
    Cancelled,
    Job,
    Prepared,
    Result,
    Source,
    Stop,
    fused,
    read,
)

if TYPE_CHECKING:
    import torch

RATE: Final = 16_000  # Whisper's, in samples a second
WINDOW_S: Final = 30  # what its encoder hears at once
FRAMES_PER_S: Final = 100  # of its spectrograms
TOGETHER_RATE_MAX: Final = 48_000  # a file of more samples a second is heard alone
DURATION_S_MAX: Final = 2 * 3600
CHANNELS_MAX: Final = 16
SAMPLE_RATES: Final = range(4_000, 384_001)
BLOCK_FRAMES: Final = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A job, checked.  ``long``: of more than one window; ``stamped``: its answer has times."""

    job: Job
    language: str | None
    segments: bool
    long: bool
    stamped: bool


class SpeechRunner:
    """A Whisper model and its processor."""

    kind = "speech"
    bounds = Bounds(rows_max=8)
    unit = FRAMES_PER_S

    def __init__(self, model: Any, processor: Any, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._model = model
        self._processor = processor

    @classmethod
    def load(cls, source: Source, resident: Any) -> "SpeechRunner":
        """Read it from its folder."""
        from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

        processor = AutoProcessor.from_pretrained(source.path, local_files_only=True)
        model = read(AutoModelForSpeechSeq2Seq, source)
        return cls(model, processor, resident(model))

    def bytes_needed(self, job: Job) -> int:
        """Of one file, with its own sample rate."""
        with _open(job) as sound:
            return self._bytes_for(sound.frames / sound.samplerate, sound.samplerate, 1)

    def bytes_together(self, tokens: int, rows: int) -> int:
        """Of files that last so many frames of the spectrogram at most."""
        return self._bytes_for(tokens / FRAMES_PER_S, TOGETHER_RATE_MAX, rows)

    def _bytes_for(self, seconds: float, rate: int, rows: int) -> int:
        """The larger of two: one sound becoming a spectrogram, and the model hearing a window.

        Source: the tensors of transformers' Whisper.  Waveform: mono float32 and, while it is
        resampled, two spectra of complex64 and two copies.  Spectrogram: 100 frames a second of
        201 complex64, their squares, and the mel bins.  Encoder: for each of its positions
        residual, normed copy, queries, keys, values, output, and two of the inner size; two
        convolutions at twice the positions.  Decoder: keys and values over the encoder's
        positions and over its own, in each layer, one held twice; float32 logits.
        """
        config, item = self._model.config, self._model.dtype.itemsize
        heard, said = config.max_source_positions, config.max_target_positions
        width, mels = config.d_model, config.num_mel_bins
        windowed = max(seconds, WINDOW_S)
        frames = int(windowed * FRAMES_PER_S)
        wave = 4 * (4 * int(seconds * rate) + 4 * int(windowed * RATE))
        spectrogram = frames * (201 * (8 + 4 + 4) + mels * 4 * 4)
        encoder = heard * item * (8 * width + 2 * config.encoder_ffn_dim + 4 * width)
        if not fused(config):
            encoder += config.encoder_attention_heads * heard**2 * (item + 8)
        caches = 2 * (config.decoder_layers + 1) * (heard + said) * width * item
        features = 4 * mels * frames
        held = features if rows == 1 else 2 * rows * features  # they are joined to one tensor
        hear = wave + spectrogram + rows * features
        say = held + rows * (encoder + caches + config.vocab_size * 48)
        return int(max(hear, say)) + RUN_BYTES

    def size(self, job: Job) -> tuple[int, int]:
        """Frames of the spectrogram, a hundred a second, of a whole window at least; one row."""
        with _open(job) as sound:
            return int(max(sound.frames / sound.samplerate, WINDOW_S) * FRAMES_PER_S), 1

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Write down what is said."""
        (result,) = self.run_together([self.prepare(job)], cancelled)
        return result

    def prepare(self, job: Job) -> Prepared:
        """Read the header, and check the rest; the sound is decoded when its bytes are there.

        A file of more than one window goes with its like alone: its answer has time stamps, where
        that of a shorter one has none unless they are asked for.
        """
        language, segments = self._language(job), bool(job.get("segments"))
        with _open(job) as sound:
            long = sound.frames > WINDOW_S * sound.samplerate
            usual = sound.samplerate <= TOGETHER_RATE_MAX
        config = self._model.generation_config
        can_stamp = getattr(config, "no_timestamps_token_id", None) is not None
        asked = _Asked(job, language, segments, long, stamped=long or (segments and can_stamp))
        return Prepared(
            *self.size(job),
            self.bytes_needed(job),
            asked,
            alike=(long, asked.stamped) if usual else asked,
        )

    def run_together(self, jobs: Sequence[Prepared], cancelled: Cancelled) -> list[Result]:
        """Write down what is said in each of several files that are alike."""
        import torch

        asked: list[_Asked] = [job.inputs for job in jobs]

        def halt(ids: Any, _scores: Any, **_: Any) -> Any:
            if cancelled():
                raise Stop
            return torch.zeros((ids.shape[0],), dtype=torch.bool, device=ids.device)

        try:
            with torch.inference_mode():
                features, mask, durations_s = self._hear(asked, cancelled)
                spoken, task = self._spoken(asked, features)
                found = self._model.generate(
                    features,
                    attention_mask=mask,
                    stopping_criteria=[halt],
                    return_timestamps=asked[0].stamped,
                    return_segments=True,
                    **task,
                )["segments"]
        except Stop:
            return [Result({"text": "", "duration_s": 0.0})] * len(jobs)
        return [
            Result(self._answer(*row))
            for row in zip(asked, found, durations_s, spoken, strict=True)
        ]

    def _hear(
        self, asked: "list[_Asked]", cancelled: Cancelled
    ) -> tuple["torch.Tensor", "torch.Tensor", list[float]]:
        """What the encoder is given, and how long each file lasts, in seconds.

        Each file becomes a spectrogram by itself, so that it is the same in whatever company.

        Shapes: features (files, mels, frames) of the model's type, mask (files, frames) bool.
        """
        import torch
        from torch.nn.functional import pad

        heard, durations_s = [], []
        for one in asked:
            if cancelled():
                raise Stop
            wave, duration_s = decode(one.job)
            # A longer file is heard window by window, each beginning at the last one's time stamp.
            whole = {"truncation": False, "padding": "longest"} if one.long else {}
            inputs = self._processor(wave.numpy(), sampling_rate=RATE, return_tensors="pt", **whole)
            heard.append(inputs["input_features"][0])
            durations_s.append(duration_s)
        lengths = torch.tensor([each.shape[1] for each in heard])
        frames = max(WINDOW_S * FRAMES_PER_S, int(lengths.max()))
        wide = [
            each if each.shape[1] == frames else pad(each, (0, frames - each.shape[1]))
            for each in heard
        ]
        features = wide[0][None] if len(wide) == 1 else torch.stack(wide)
        mask = torch.arange(frames) < lengths[:, None]
        device = self._model.device
        return features.to(device, self._model.dtype), mask.to(device), durations_s

    def _spoken(
        self, asked: "list[_Asked]", features: "torch.Tensor"
    ) -> tuple[list[str | None], dict[str, Any]]:
        """The language of each file, as it was asked for or as the model hears it.

        Returns:
            Their codes, where they are known, and what ``generate`` is to be told of them.
        """
        config = self._model.generation_config
        several = getattr(config, "is_multilingual", None)
        if not several:
            return ["en" if several is False else one.language for one in asked], {}
        own, known = getattr(config, "language", None), getattr(config, "lang_to_id", None)
        codes = [one.language or (own and own.strip("<|>")) for one in asked]
        unknown = [row for row, code in enumerate(codes) if code is None]
        if unknown and known:
            marks = {number: mark.strip("<|>") for mark, number in known.items()}
            first = features[unknown, :, : WINDOW_S * FRAMES_PER_S]
            for row, found in zip(
                unknown, self._model.detect_language(first).tolist(), strict=True
            ):
                codes[row] = marks[found]
        return codes, {"task": "transcribe", "language": None if None in codes else codes}

    def _answer(
        self, asked: "_Asked", found: list[Any], duration_s: float, code: str | None
    ) -> dict[str, Any]:
        """What was said, from what ``generate`` calls segments."""
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        if asked.stamped:
            # What the model makes of the silence after a file's end is not in the file.
            found = [one for one in found if float(one["start"]) < duration_s] or found
        tokens = [token for one in found for token in one["tokens"].tolist()]
        text = self._text(tokens)
        answer = {"text": text.strip(), "duration_s": duration_s}
        if code is not None:
            answer["language"] = LANGUAGES.get(code, code)
        if asked.segments:
            parts = [
                (part, self._text(part), float(one["start"]), float(one["end"]))
                for one in (found if asked.stamped else ())
                if (part := one["tokens"].tolist())
            ]
            said = [part for part in parts if part[1].strip()] or [(tokens, text, 0.0, duration_s)]
            answer["segments"] = [_segment(at, *part, duration_s) for at, part in enumerate(said)]
        return answer

    def _text(self, tokens: list[int]) -> str:
        text: str = self._processor.decode(tokens, skip_special_tokens=True)
        return text

    def _language(self, job: Job) -> str | None:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        asked = job.get("language")
        if asked is None:
            return None
        name = str(asked).lower()
        code = str(TO_LANGUAGE_CODE.get(name, name))
        known = getattr(self._model.generation_config, "lang_to_id", None) or {"<|en|>": 0}
        if f"<|{code}|>" not in known:
            names = ", ".join(sorted(mark.strip("<|>") for mark in known))
            raise InvalidParams(f"the model knows no language {asked!r}; it knows {names}")
        return code


def _segment(
    ident: int, tokens: list[int], text: str, start_s: float, end_s: float, duration_s: float
) -> dict[str, Any]:
    """A piece of an answer as OpenAI's API shows it, but for what is not known (log probabilities).

    Its times are within the file, whatever the model says.
    """
    start_s = min(max(start_s, 0.0), duration_s)
    data = text.encode()
    return {
        "id": ident,
        "start": round(start_s, 2),
        "end": round(min(max(start_s, end_s), duration_s), 2),
        "text": text,
        "tokens": tokens,
        "temperature": 0.0,  # the likeliest tokens
        "compression_ratio": round(len(data) / len(zlib.compress(data)), 3),
    }


def _open(job: Job) -> Any:
    """Read the header, and refuse what would be too long to decode."""
    import soundfile

    data = job.get("audio")
    if not isinstance(data, bytes):
        raise InvalidParams("audio must be the bytes of a file")
    try:
        sound = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError as error:
        raise InvalidParams(f"the audio cannot be read: {_why(error)}") from error
    if sound.frames <= 0:
        raise InvalidParams("the audio holds no sound")
    if sound.samplerate not in SAMPLE_RATES:
        raise InvalidParams(
            f"the audio has {sound.samplerate} Hz; "
            f"{SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]} Hz can be read"
        )
    if sound.channels > CHANNELS_MAX:
        raise InvalidParams(f"the audio has {sound.channels} channels; {CHANNELS_MAX} at most")
    if sound.frames > DURATION_S_MAX * sound.samplerate:
        seconds = sound.frames / sound.samplerate
        raise InvalidParams(f"the audio lasts {seconds:.0f} s; {DURATION_S_MAX} s at most")
    return sound


def _why(error: Exception) -> str:
    """The library's reason alone: its whole text names an object of this process."""
    return str(getattr(error, "error_string", "it is damaged")).rstrip(".")


def decode(job: Job) -> tuple[Any, float]:
    """Mono samples at ``RATE`` (samples,) float32, and the duration in seconds."""
    import numpy as np
    import soundfile
    import torch

    with _open(job) as sound:
        rate, mono = sound.samplerate, np.zeros(sound.frames, dtype=np.float32)
        at = 0
        try:
            # By blocks: only the mono samples of a long file are held.
            for block in sound.blocks(BLOCK_FRAMES, dtype="float32", always_2d=True):
                block = block[: len(mono) - at]  # a header may promise too little
                mono[at : at + len(block)] = block.mean(axis=1)
                at += len(block)
        except soundfile.SoundFileError as error:
            raise InvalidParams(f"the audio cannot be decoded: {_why(error)}") from error
    wave = torch.from_numpy(np.nan_to_num(mono[:at], copy=False)).clamp_(-1, 1)
    if not at:
        raise InvalidParams("the audio holds no sound")
    return _resample(wave, rate), at / rate


def _resample(wave: Any, rate: int) -> Any:
    """Band-limited, by way of the spectrum: what lies above the lower rate's half is cut."""
    import torch

    if rate == RATE:
        return wave
    length = max(1, round(wave.shape[0] * RATE / rate))
    return torch.fft.irfft(torch.fft.rfft(wave), n=length) * (length / wave.shape[0])
