"""The kernels compiled for GPUs that are not there: the checked-in report is true, and nothing in it is bad."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import triton

from kernels.compilation import (
    ARCHITECTURES,
    Compiled,
    Specialisation,
    compile_specialisation,
    programs_per_sm,
    recorded_launch,
)
from kernels.compile_report import DOCS, faults, render, replace_generated, specialisations
from kernels.heuristics import scan_size
from tests.kernels.triton.conftest import Worker

CHECKED_IN = json.loads((DOCS / "kernels.json").read_text(encoding="utf-8"))
VERSION: str = CHECKED_IN["triton"]
REPORT = {key: Compiled(**row) for key, row in CHECKED_IN["kernels"].items()}
SPECIALISATIONS = {each.key: each for each in specialisations()}

KERNELS = ("decode", "decode_wide", "prefill", "shared_prefix", "reduce", "store", "copy", "rerotate")


def _sample() -> list[Specialisation]:
    """Every kernel on every architecture in its plain form; and every form on one of them, in turn."""
    architectures = list(ARCHITECTURES)
    plain = [Specialisation(architecture, kernel) for architecture in architectures for kernel in KERNELS]
    forms = [
        {"kernel": "decode", "every_option": True},
        {"kernel": "decode", "prefix": True},
        {"kernel": "decode", "kv_dtype": torch.int8},
        {"kernel": "decode", "head_dim": 80},
        {"kernel": "decode_wide", "prefix": True},
        {"kernel": "decode_wide", "num_seqs": 256},
        {"kernel": "prefill", "dtype": torch.float32, "kv_dtype": torch.float32},
        {"kernel": "prefill", "num_seqs": 256},
        {"kernel": "shared_prefix", "block_size": 64},
        {"kernel": "reduce", "prefix": True},
        {"kernel": "store", "kv_dtype": torch.int8},
    ]
    turns = [Specialisation(architectures[index % 3], **form) for index, form in enumerate(forms)]
    return plain + turns


COMPILED_AGAIN = _sample()


def check_row(specialisation: Specialisation, compiler: Worker) -> None:
    compiled = compiler(compile_specialisation, specialisation)
    assert faults(specialisation, compiled) == []
    assert compiled == REPORT[specialisation.key], "run `make kernels-report`"


def test_the_report_is_by_the_triton_that_is_installed() -> None:
    """Else the rows below would differ for another reason than a changed kernel."""
    assert triton.__version__ == VERSION, "run `make kernels-report`"


@pytest.mark.parametrize("specialisation", COMPILED_AGAIN, ids=lambda each: each.key)
def test_the_report_is_what_the_compiler_says(specialisation: Specialisation, compiler: Worker) -> None:
    """A kernel that was changed and not compiled again for the report would be judged by its former self."""
    check_row(specialisation, compiler)


@pytest.mark.skipif("RADIXGATE_EVERY_ROW" not in os.environ, reason="ten minutes: set RADIXGATE_EVERY_ROW")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_is_what_the_compiler_says(architecture: int, compiler: Worker) -> None:
    """The rest of the report, where the sample above is not enough: before a release, with another Triton."""
    for each in SPECIALISATIONS.values():
        if each.architecture == architecture and each not in COMPILED_AGAIN:
            check_row(each, compiler)


def test_the_sample_has_every_kernel_on_every_architecture() -> None:
    assert {(each.architecture, each.kernel) for each in COMPILED_AGAIN} == {
        (each.architecture, each.kernel) for each in SPECIALISATIONS.values()
    }


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
        "shared_memory": 70_000, "tensor_memory": 0, "programs_per_sm": 3, "wide_loads": 50, "half_loads": 0,
        "narrow_loads": 2, "buffers": 2, "matrix": "HMMA", "matrix_count": 32,
    }  # fmt: skip
    return Compiled(**(plain | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spilled": 8}, "spills"),
        ({"shared_memory": 233_000}, "shared memory"),
        ({"programs_per_sm": 0}, "does not fit"),
        ({"wide_loads": 49}, "16 bytes"),
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


@pytest.mark.parametrize(
    ("kernel", "kv_dtype", "every_option", "enough"),
    [
        # A thread's part of a tile of 64 · 128, of 128 threads: 128 bytes, 8 loads, in 16 bits. Keys and values, at
        # three places of a loop: 48. Prefill has two loops, three with a window. The query's own: 16 · 128, 2 loads.
        ("decode", torch.bfloat16, False, {"wide_loads": 50}),
        ("prefill", torch.bfloat16, False, {"wide_loads": 98}),
        ("prefill", torch.bfloat16, True, {"wide_loads": 146}),
        # In 8 bits half as many, or by 8 bytes.
        ("decode", torch.int8, False, {"wide_loads": 14, "half_loads": 24}),
        ("decode", torch.int8, False, {"wide_loads": 26, "half_loads": 0}),
    ],
)
def test_both_tiles_must_come_by_wide_loads(
    kernel: str, kv_dtype: torch.dtype, every_option: bool, enough: dict[str, int]
) -> None:
    """One wide load anywhere was enough: the query's, while keys or values came by two bytes."""
    specialisation = Specialisation(90, kernel, kv_dtype=kv_dtype, every_option=every_option)
    assert faults(specialisation, _compiled(**enough)) == []
    fewer = {name: count - 1 for name, count in enough.items() if count}
    for name, count in fewer.items():
        assert "loads keys and values" in faults(specialisation, _compiled(**(enough | {name: count})))[0]


def test_options_are_those_that_the_kernel_has() -> None:
    """Rows of the shared pass were said to have a window and sinks, and were compiled without."""
    options = {
        (kernel, prefix): Specialisation(90, kernel, every_option=True, prefix=prefix).options
        for kernel, prefix in [("decode", False), ("decode", True), ("shared_prefix", False), ("reduce", False)]
    }
    assert options == {
        ("decode", False): ["window", "cap", "sinks"],
        ("decode", True): ["cap", "sinks"],
        ("shared_prefix", False): ["cap"],
        ("reduce", False): ["window", "sinks"],
    }


@pytest.mark.parametrize("key", [key for key in SPECIALISATIONS if key.startswith("sm_90")])
def test_a_row_is_compiled_as_it_is_labelled(key: str) -> None:
    """And with tables as wide as the engine's: a stride that is no multiple of 16 is another variant."""
    each = SPECIALISATIONS[key]
    if each.num_seqs > 256:
        return  # as the smaller one
    arguments = _arguments(each)
    flags = {"HAS_WINDOW": "window", "HAS_SOFT_CAP": "cap", "HAS_SINKS": "sinks"}
    for flag, option in flags.items():
        if flag in arguments:
            assert arguments[flag] == (option in key), flag
    expected = {"HAS_PREFIX": each.prefix, "GROUP": each.group, "SEQS": scan_size(each.num_seqs)}
    for name, value in expected.items():
        assert arguments.get(name, value) == value, name
    assert arguments.get("table_stride", 16) % 16 == 0


def _arguments(specialisation: Specialisation) -> dict[str, Any]:
    launch = recorded_launch(specialisation)
    function: Any = launch.function
    return dict(zip(function.arg_names, launch.args, strict=False)) | launch.kwargs


def test_occupancy_is_bound_by_the_scarcest() -> None:
    """Worked by hand for a multiprocessor of 65,536 registers, 64 warps, 228 KB, 512 columns of tensor memory."""
    hopper, blackwell = ARCHITECTURES[90], ARCHITECTURES[100]
    assert programs_per_sm(hopper, registers=128, num_warps=4, shared_memory=20_000, tensor_memory=0) == 4
    assert programs_per_sm(hopper, registers=129, num_warps=4, shared_memory=20_000, tensor_memory=0) == 3
    assert programs_per_sm(hopper, registers=32, num_warps=4, shared_memory=100_000, tensor_memory=0) == 2
    assert programs_per_sm(hopper, registers=32, num_warps=8, shared_memory=0, tensor_memory=0) == 8
    assert programs_per_sm(blackwell, registers=32, num_warps=4, shared_memory=0, tensor_memory=200) == 2
