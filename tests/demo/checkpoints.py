"""Five small checkpoints with random weights, as save_pretrained writes real ones.

Real classes, real tokenizers (trained here, on our own sentences), deterministic: the same
version gives the same bytes.  They say nothing sensible; they load, answer and cost memory the
way their large relatives do.  A folder is built beside its place and renamed, so that a reader
never sees half a checkpoint.

    python tests/demo/checkpoints.py FOLDER
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

VERSION: Final = "1"  # raise it when a checkpoint changes: every copy is then rebuilt
MARKER: Final = ".version"
SEED: Final = 20


def _language_model(config_class: Any, tokenizer: Any, dtype: str, **sizes: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = config_class(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()


def build_llama(folder: Path) -> None:
    """A Llama of 4 layers in float32."""
    from transformers import LlamaConfig

    from tests.demo.words import CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(CHAT_TEMPLATE, 2048)
    model = _language_model(
        LlamaConfig,
        tokenizer,
        "float32",
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_qwen(folder: Path) -> None:
    """A Qwen2 of 6 layers in bfloat16, with tied embeddings."""
    from transformers import Qwen2Config

    from tests.demo.words import CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(CHAT_TEMPLATE, 4096)
    model = _language_model(
        Qwen2Config,
        tokenizer,
        "bfloat16",
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=6,
        num_attention_heads=10,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_vision(folder: Path) -> None:
    """A LLaVA: a CLIP vision tower before a Llama."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from tests.demo.words import IMAGE_CHAT_TEMPLATE, chat_tokenizer

    tokenizer = chat_tokenizer(IMAGE_CHAT_TEMPLATE, 2048, "<image>")
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}
    )
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_CHAT_TEMPLATE,
    )
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            image_size=112,
            patch_size=14,
            projection_dim=192,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=224,
            intermediate_size=640,
            num_hidden_layers=4,
            num_attention_heads=7,
            num_key_value_heads=7,
            max_position_embeddings=2048,
            **ids,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=64,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    model = LlavaForConditionalGeneration(config).eval()
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def build_sdxl(folder: Path) -> None:
    """A Stable Diffusion XL: two text encoders, a UNet of two levels, a VAE of factor 8."""
    import torch
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    from tests.demo.words import clip_tokenizer

    tokenizer = clip_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 32, 32, 64),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=128,
            scaling_factor=0.13025,
        ),
        text_encoder=CLIPTextModel(text),
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(
            sample_size=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(64, 96),
            layers_per_block=1,
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(4, 6),
            cross_attention_dim=128,  # both text encoders side by side
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=64 + 6 * 16,
            norm_num_groups=16,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )
    pipeline.save_pretrained(folder)


def build_whisper(folder: Path) -> None:
    """A Whisper of 4 + 3 layers with its special tokens, languages and time stamps."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
    )

    from tests.demo.words import whisper_tokenizer

    languages = ("en", "de", "fr", "es", "zh")
    specials = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{language}|>" for language in languages),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    tokenizer = whisper_tokenizer(specials)
    token = {name: tokenizer.convert_tokens_to_ids(name) for name in specials}
    end, start = token["<|endoftext|>"], token["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=192,
        encoder_layers=4,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=640,
        decoder_ffn_dim=640,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(SEED)
    model = WhisperForConditionalGeneration(config).eval()
    # Quieter time stamps: an untrained model would say little else, and they are no text.
    with torch.no_grad():
        model.get_input_embeddings().weight[token["<|notimestamps|>"] + 1 :] *= 0.1
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=end,
        max_length=64,
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": token[f"<|{language}|>"] for language in languages},
        task_to_id={name: token[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=token["<|notimestamps|>"],
        prev_sot_token_id=token["<|startofprev|>"],
        max_initial_timestamp_index=50,
        return_timestamps=False,
        # never a special token inside the text
        suppress_tokens=[number for name, number in token.items() if number != end],
        begin_suppress_tokens=[end],
    )
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)


BUILDERS: Final[dict[str, Callable[[Path], None]]] = {
    "llama": build_llama,
    "qwen": build_qwen,
    "vision": build_vision,
    "sdxl": build_sdxl,
    "whisper": build_whisper,
}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One builder at a time, across processes."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_all(folder: Path, progress: Callable[[str], None] | None = None) -> dict[str, Path]:
    """Make the checkpoints that are missing or of another version.

    Args:
        folder: where they go, one folder each; made if need be.
        progress: told the name of each checkpoint before it is built.

    Returns:
        The name of each checkpoint and its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = {name: folder / name for name in BUILDERS}
    with _alone(folder):
        for name, place in places.items():
            marker = place / MARKER
            if marker.is_file() and marker.read_text() == VERSION:
                continue
            if progress is not None:
                progress(name)
            _build(name, place)
    return places


def _build(name: str, place: Path) -> None:
    from umad.serve.loader import quiet

    quiet()
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}-") as temporary:
        fresh = Path(temporary) / name
        fresh.mkdir()
        BUILDERS[name](fresh)
        for file in fresh.rglob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes 0600; a service has a user of its own
        (fresh / MARKER).write_text(VERSION)
        if place.exists():
            shutil.rmtree(place)
        fresh.rename(place)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # as a script, only this folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER")
    for key, path in build_all(Path(sys.argv[1]), lambda name: print(f"building {name}")).items():
        print(f"{key}: {path}")
