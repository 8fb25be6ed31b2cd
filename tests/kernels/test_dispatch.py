from __future__ import annotations

import pytest
import torch

from kernels.dispatch import select_kernels


def test_each_device_gets_its_own_kernels() -> None:
    assert select_kernels(torch.device("cpu")).name == "cpu"
    assert select_kernels(torch.device("meta")).name == "reference"
    assert select_kernels(torch.device("cpu"), "reference").name == "reference"


def test_each_set_has_a_workspace_of_its_own() -> None:
    """Two engines in one process, as tests have them, must not write into one workspace from two threads."""
    first, second = select_kernels(torch.device("cpu")), select_kernels(torch.device("cpu"))
    assert first.paged_attention != second.paged_attention


@pytest.mark.parametrize(("device", "name"), [("cpu", "fastest"), ("meta", "cpu"), ("cpu", "triton")])
def test_what_cannot_run_is_refused(device: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        select_kernels(torch.device(device), name)
