"""The kernels compiled for GPUs that are not there: the checked-in report is true, and nothing in it is bad."""

from __future__ import annotations

import json

import pytest
import torch
import triton

from kernels.compilation import ARCHITECTURES, Compiled, Specialisation, compile_specialisation, programs_per_sm
from kernels.compile_report import DOCS, faults, render, replace_generated, specialisations
from tests.kernels.triton.conftest import Worker

CHECKED_IN = json.loads((DOCS / "kernels.json").read_text(encoding="utf-8"))
VERSION: str = CHECKED_IN["triton"]
REPORT = {key: Compiled(**row) for key, row in CHECKED_IN["kernels"].items()}
SPECIALISATIONS = {each.key: each for each in specialisations()}

# Some of each kernel and architecture; `make kernels-report` compiles them all, for minutes.
COMPILED_AGAIN = [
    Specialisation(80, "decode"),
    Specialisation(80, "prefill"),
    Specialisation(80, "store"),
    Specialisation(90, "decode"),
    Specialisation(90, "decode", every_option=True),
    Specialisation(90, "decode", kv_dtype=torch.float8_e4m3fn),
    Specialisation(90, "prefill"),
    Specialisation(90, "shared_prefix"),
    Specialisation(90, "reduce"),
    Specialisation(90, "rerotate"),
    Specialisation(90, "copy"),
    Specialisation(100, "decode", 64),
    Specialisation(100, "prefill"),
]


@pytest.mark.parametrize("specialisation", COMPILED_AGAIN, ids=lambda each: each.key)
def test_the_report_is_what_the_compiler_says(specialisation: Specialisation, compiler: Worker) -> None:
    """A kernel that was changed and not compiled again for the report would be judged by its former self."""
    compiled = compiler(compile_specialisation, specialisation)
    assert faults(specialisation, compiled) == []
    if triton.__version__ == VERSION:
        assert compiled == REPORT[specialisation.key]


def test_the_report_has_every_specialisation_and_no_other() -> None:
    assert list(REPORT) == list(SPECIALISATIONS)


@pytest.mark.parametrize("key", SPECIALISATIONS)
def test_no_specialisation_is_at_fault(key: str) -> None:
    """No spills, within registers and shared memory, loads of 16 bytes, matrix instructions, loads while computing."""
    assert faults(SPECIALISATIONS[key], REPORT[key]) == []


def test_the_document_shows_the_report() -> None:
    document = (DOCS / "kernels.md").read_text(encoding="utf-8")
    assert replace_generated(document, render(VERSION, REPORT)) == document


def test_fp8_keys_are_widened_before_they_are_multiplied() -> None:
    """Tensor cores sum fp8 products in about 14 bits: over a long context the scores drift."""
    fp8 = [key for key in REPORT if "fp8 KV" in key]
    assert len(fp8) > 6
    assert not any(REPORT[key].matrix in ("QGMMA", "QMMA", "UTCQMMA") for key in fp8)


def test_prefill_tiles_are_64_rows_or_more() -> None:
    """16 rows a tile, as decode has them, made a public prefill kernel 2.5 times slower at 8,000 tokens."""
    for key, each in SPECIALISATIONS.items():
        if each.kernel == "prefill" and each.dtype != torch.float32:
            assert REPORT[key].block_m >= 64, key


def _compiled(**changes: int | str) -> Compiled:
    plain: dict[str, int | str] = {
        "block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "registers": 128, "spilled": 0,
        "shared_memory": 70_000, "tensor_memory": 0, "programs_per_sm": 3, "wide_loads": 8, "narrow_loads": 2,
        "buffers": 2, "matrix": "HMMA", "matrix_count": 32,
    }  # fmt: skip
    return Compiled(**(plain | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spilled": 8}, "spills"),
        ({"shared_memory": 233_000}, "shared memory"),
        ({"programs_per_sm": 0}, "does not fit"),
        ({"wide_loads": 0}, "16 bytes"),
        ({"buffers": 1}, "while it computes"),
        ({"matrix": ""}, "no matrix instruction"),
        ({"matrix": "QGMMA"}, "QGMMA"),
    ],
)
def test_each_fault_is_seen(changes: dict[str, int | str], fault: str) -> None:
    specialisation = Specialisation(90, "decode")
    assert faults(specialisation, _compiled()) == []
    found = faults(specialisation, _compiled(**changes))
    assert len(found) == 1
    assert fault in found[0]


def test_occupancy_is_bound_by_the_scarcest() -> None:
    """Worked by hand for a multiprocessor of 65,536 registers, 64 warps, 228 KB, 512 columns of tensor memory."""
    hopper, blackwell = ARCHITECTURES[90], ARCHITECTURES[100]
    assert programs_per_sm(hopper, registers=128, num_warps=4, shared_memory=20_000, tensor_memory=0) == 4
    assert programs_per_sm(hopper, registers=129, num_warps=4, shared_memory=20_000, tensor_memory=0) == 3
    assert programs_per_sm(hopper, registers=32, num_warps=4, shared_memory=100_000, tensor_memory=0) == 2
    assert programs_per_sm(hopper, registers=32, num_warps=8, shared_memory=0, tensor_memory=0) == 8
    assert programs_per_sm(blackwell, registers=32, num_warps=4, shared_memory=0, tensor_memory=200) == 2
