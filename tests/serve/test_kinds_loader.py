"""Loading: what is told, what is refused, and where the weights lie afterwards."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.demo.fixtures import FOLDERS, checkpoints, minilm, runner
from umad.errors import InvalidParams, ModelFailed
from umad.serve.loader import RUNNERS, load
from umad.settings import MODEL_KINDS

pytestmark = [pytest.mark.models, pytest.mark.slow]


def no_progress(_stage: str, _ratio: float) -> None:
    return None


def module_of(kind: str, name: str | None = None) -> Any:
    import torch

    model: Any = runner(kind, name)
    if kind != "image":
        return model._model
    parts = model._pipeline.components.values()
    return torch.nn.ModuleList([part for part in parts if isinstance(part, torch.nn.Module)])


def test_every_kind_of_the_configuration_has_a_runner() -> None:
    assert set(RUNNERS) == set(MODEL_KINDS)
    assert all(runner(kind).kind == kind for kind in MODEL_KINDS)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_progress_is_told_in_order(kind: str) -> None:
    path = minilm() if kind == "embedding" else checkpoints() / FOLDERS[kind]
    told: list[tuple[str, float]] = []
    load(kind, str(path), progress=lambda stage, ratio: told.append((stage, ratio)))
    stages = [stage for stage, _ in told]
    assert told[0] == ("reading", 0.0)
    assert told[-1] == ("ready", 1.0)
    assert list(dict.fromkeys(stages)) == ["reading", "building", "ready"]
    assert stages == sorted(stages, key=["reading", "building", "ready"].index)
    if kind != "image":  # whose parts are counted each on its own
        ratios = [ratio for stage, ratio in told if stage == "reading"]
        assert ratios == sorted(ratios)
        assert ratios[-1] == 1.0
        assert len(ratios) > 10


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_resident_bytes_are_those_of_the_weights(kind: str) -> None:
    module = module_of(kind)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*module.parameters(), *module.buffers()]
    }
    assert runner(kind).resident_bytes == sum(storages.values())


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_no_weight_stays_a_mapping_of_its_file(kind: str) -> None:
    addresses = [tensor.data_ptr() for tensor in module_of(kind).parameters()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    for line in lines:
        if line.endswith(".safetensors"):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            assert not any(low <= address < high for address in addresses)
    assert not any(tensor.requires_grad for tensor in module_of(kind).parameters())


def test_tied_weights_stay_tied() -> None:
    model = module_of("chat", "qwen")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("kind", ["chat", "image"])
def test_the_type_can_be_chosen(kind: str) -> None:
    path = str(checkpoints() / FOLDERS[kind])
    half = load(kind, path, dtype="bfloat16", progress=no_progress)
    assert half.resident_bytes < 0.52 * runner(kind).resident_bytes


def test_the_type_is_the_checkpoint_s_own() -> None:
    import torch

    assert module_of("chat", "qwen").dtype == torch.bfloat16
    assert module_of("chat", "llama").dtype == torch.float32


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidParams, match="unknown kind 'video'"):
        load("video", "/", progress=no_progress)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_an_empty_folder_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match=r"holds no config\.json"):
        load(kind, str(tmp_path), progress=no_progress)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("chat", "whisper"),
        ("vision", "llama"),
        ("speech", "llama"),
        ("image", "llama"),
        ("chat", "sdxl"),
        ("embedding", "sdxl"),
    ],
)
def test_a_model_of_another_kind_is_refused(kind: str, name: str) -> None:
    with pytest.raises(ModelFailed, match=name):
        load(kind, str(checkpoints() / name), progress=no_progress)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").unlink(),
    ],
)
def test_a_broken_checkpoint_is_refused(spoil: Any, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(checkpoints() / "llama", folder)
    spoil(folder)
    with pytest.raises(ModelFailed, match="cannot be loaded"):
        load("chat", str(folder), progress=no_progress)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "llama"
    shutil.copytree(checkpoints() / "llama", folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFailed, match=r"lacks 1 weights, model\.layers\.2"):
        load("chat", str(folder), progress=no_progress)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(checkpoints() / "llama", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelFailed, match="cannot be loaded"):
        load("chat", str(folder), progress=no_progress)


def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    shutil.copytree(minilm(), folder)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelFailed, match="pools by 'max'"):
        load("embedding", str(folder), progress=no_progress)


def test_a_model_without_a_template_takes_plain_prompts_only(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(checkpoints() / "llama", folder)
    (folder / "chat_template.jinja").unlink()
    bare = load("chat", str(folder), progress=no_progress)
    with pytest.raises(InvalidParams, match="no chat template"):
        bare.run({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, lambda: False)
    answer = bare.run({"prompt": "x", "max_tokens": 1}, lambda: False).data
    assert answer["completion_tokens"] == 1  # a random token may be half a character: no text
