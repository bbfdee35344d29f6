"""Bringing in torch and what stands on it, in the processes that run models.

Owns the order of it: the environment before the import, the warm-up before a fork, the division
of the cores after one.  Imports nothing heavy by itself.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import structlog

from umad.serve.loaded import Load
from umad.settings import Settings

# What a process that forks models must have set before it imports anything.
BEFORE_IMPORT: Final = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # torch.cuda.is_available() must ask the driver's library: asking the device would leave a
    # context behind that no forked process can use.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_ALWAYS: Final = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
log = structlog.get_logger()


def bring() -> Load:
    """Import torch and transformers and return what reads models."""
    import torch
    import transformers  # noqa: F401  its bytes belong to the runtime, not to the first model

    from umad.serve import loader

    loader.quiet()
    log.info("engine.libraries", torch=torch.__version__)
    return loader.load


def share_cores(settings: Settings) -> None:
    """Give this process's torch its part of the cores; nothing without torch.

    Every worker has an OpenMP team of its own, thread or process: together they must not
    outnumber the cores, or all of them wait for each other at every barrier.
    """
    if (torch := sys.modules.get("torch")) is not None:
        workers = sum(model.instances for model in settings.models)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // max(1, workers)))


def device_touched() -> bool:
    """Whether this process has a GPU context, which a forked one could not use."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def warm(paths: Iterable[str]) -> None:
    """Import the classes that these checkpoints name, as their loads would.

    Only names are looked up, in transformers and diffusers alone; nothing is read or built, so no
    thread starts.  What cannot be had is left to the load, which says why.
    """
    wanted = [("transformers", name) for name in _ALWAYS]
    for path in paths:
        wanted += _named(Path(path))
    for library, name in wanted:
        with suppress(ImportError, AttributeError, RuntimeError):
            getattr(import_module(library), name)


def _named(folder: Path) -> Iterator[tuple[str, str]]:
    """(library, class) for each class that a checkpoint's files name."""
    config = _read(folder / "config.json")
    for name in config.get("architectures") or ():
        yield "transformers", str(name)
    tokenizer = _read(folder / "tokenizer_config.json").get("tokenizer_class")
    if tokenizer:
        yield "transformers", str(tokenizer)
    for part in _read(folder / "model_index.json").values():
        if isinstance(part, list) and len(part) == 2 and part[0] in ("transformers", "diffusers"):
            yield str(part[0]), str(part[1])
    pipeline = _read(folder / "model_index.json").get("_class_name")
    if pipeline:
        yield "diffusers", str(pipeline)


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
    return {}
