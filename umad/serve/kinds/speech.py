"""Kind "speech": Whisper.

Job: ``audio`` (bytes of a WAV, FLAC, OGG or MP3 file), ``language`` ("en", "english", ...) or None
to let the model find it.  Result: ``text``, ``duration_s``.
"""

import io
from typing import Any, Final

from umad.errors import InvalidParams
from umad.serve.kinds.base import RUN_BYTES, Cancelled, Job, Result, Source, Stop, fused, read

RATE: Final = 16_000  # Whisper's, in samples a second
WINDOW_S: Final = 30  # what its encoder hears at once
DURATION_S_MAX: Final = 2 * 3600
CHANNELS_MAX: Final = 16
SAMPLE_RATES: Final = range(4_000, 384_001)
BLOCK_FRAMES: Final = 1 << 16


class SpeechRunner:
    """A Whisper model and its processor."""

    kind = "speech"

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
        """The larger of two: the sound becoming a spectrogram, and the model hearing a window.

        Source: the tensors of transformers' Whisper.  Waveform: mono float32 and, while it is
        resampled, two spectra of complex64 and two copies.  Spectrogram: 100 frames a second of
        201 complex64, their squares, and the mel bins.  Encoder: for each of its positions
        residual, normed copy, queries, keys, values, output, and two of the inner size; two
        convolutions at twice the positions.  Decoder: keys and values over the encoder's
        positions and over its own, in each layer, one held twice; float32 logits.
        """
        with _open(job) as sound:
            seconds = sound.frames / sound.samplerate
            samples = sound.frames
        config, item = self._model.config, self._model.dtype.itemsize
        heard, said = config.max_source_positions, config.max_target_positions
        width, mels = config.d_model, config.num_mel_bins
        windowed = max(seconds, WINDOW_S)
        wave = 4 * (4 * samples + 4 * int(windowed * RATE))
        spectrogram = int(windowed * 100) * (201 * (8 + 4 + 4) + mels * 4 * 4)
        encoder = heard * item * (8 * width + 2 * config.encoder_ffn_dim + 4 * width)
        if not fused(config):
            encoder += config.encoder_attention_heads * heard**2 * (item + 8)
        caches = 2 * (config.decoder_layers + 1) * (heard + said) * width * item
        hear = wave + spectrogram
        say = 4 * mels * int(windowed * 100) + encoder + caches + config.vocab_size * 48
        return int(max(hear, say)) + RUN_BYTES

    def size(self, job: Job) -> tuple[int, int]:
        """Frames of the spectrogram, a hundred a second, of a whole window at least; one row."""
        with _open(job) as sound:
            return int(max(sound.frames / sound.samplerate, WINDOW_S) * 100), 1

    def run(self, job: Job, cancelled: Cancelled) -> Result:
        """Write down what is said."""
        import torch

        language = self._language(job)
        wave, duration_s = decode(job)
        long = wave.shape[0] > WINDOW_S * RATE
        # A longer file is heard window by window, each beginning at the last one's time stamp.
        inputs = self._processor(
            wave.numpy(),
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            **({"truncation": False, "padding": "longest"} if long else {}),
        )

        def halt(ids: Any, _scores: Any, **_: Any) -> Any:
            if cancelled():
                raise Stop
            return torch.zeros((ids.shape[0],), dtype=torch.bool, device=ids.device)

        several = getattr(self._model.generation_config, "is_multilingual", False)
        try:
            with torch.inference_mode():
                tokens = self._model.generate(
                    inputs["input_features"].to(self._model.device, self._model.dtype),
                    attention_mask=inputs["attention_mask"].to(self._model.device),
                    stopping_criteria=[halt],
                    return_timestamps=long,
                    **({"task": "transcribe", "language": language} if several else {}),
                )
        except Stop:
            return Result({"text": "", "duration_s": duration_s})
        (said,) = self._processor.batch_decode(tokens, skip_special_tokens=True)
        return Result({"text": said.strip(), "duration_s": duration_s})

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


def _open(job: Job) -> Any:
    """Read the header, and refuse what would be too long to decode."""
    import soundfile

    data = job.get("audio")
    if not isinstance(data, bytes):
        raise InvalidParams("audio must be the bytes of a file")
    try:
        sound = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError as error:
        raise InvalidParams(f"the audio cannot be read: {error}") from error
    if sound.frames <= 0:
        raise InvalidParams("the audio holds no sound")
    if sound.samplerate not in SAMPLE_RATES or sound.channels > CHANNELS_MAX:
        raise InvalidParams(
            f"the audio has {sound.channels} channels of {sound.samplerate} Hz; at most "
            f"{CHANNELS_MAX}, from {SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]} Hz"
        )
    if sound.frames > DURATION_S_MAX * sound.samplerate:
        seconds = sound.frames / sound.samplerate
        raise InvalidParams(f"the audio lasts {seconds:.0f} s; {DURATION_S_MAX} s at most")
    return sound


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
            raise InvalidParams(f"the audio cannot be decoded: {error}") from error
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
