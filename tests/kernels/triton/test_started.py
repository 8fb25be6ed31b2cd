"""No kernel is compiled in the middle of serving: it would hold everyone up for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.settings import EngineSettings
from engine.trial_steps import _SCANS
from kernels.heuristics import scan_size
from tests.kernels.triton import started
from tests.kernels.triton.conftest import Worker


@pytest.mark.parametrize(
    ("family", "max_num_seqs"), [("llama", 32), ("llama", 2), ("llama", 200), ("llama", 256), ("gemma2", 33)]
)
def test_every_variant_of_every_kernel_is_compiled_at_start(
    family: str, max_num_seqs: int, compiler: Worker, tmp_path: Path
) -> None:
    """With full layers alone, and with windows, soft caps and full layers in turn."""
    settings = EngineSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=1024, block_size=started.BLOCK_SIZE)
    found = compiler(started.variants, tmp_path, family, settings)
    assert found.later - found.at_start == frozenset()
    # What was recorded is what was meant to be: all kernels that a step has, the shared pass among them.
    names = {each.split()[0] for each in found.later}
    kernels = {"store_rows", "paged_decode", "reduce_splits", "paged_prefill", "copy_planes"}
    assert names == (kernels if max_num_seqs == 2 else kernels | {"shared_prefix_decode"})


def test_the_trial_has_the_kernels_own_numbers_of_sequences() -> None:
    assert [scan_size(scan) for scan in _SCANS] == list(_SCANS)
    assert [scan_size(scan + 1) for scan in _SCANS[:-1]] == list(_SCANS[1:])
