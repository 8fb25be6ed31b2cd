from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.packed_linear import PackedLinear, pack_linears

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 instructions"
        ),
    ),
]


def random_linear(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 96), (0, 96), (5, 96), (1, 1, 96), (1, 7, 96), (1, 0, 96)])
def test_equals_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    """One row, none, many, with and without the model's batch axis and a bias."""
    linear = random_linear(96, 40, dtype, bias=bias)
    hidden = torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        expected, output = linear(hidden), PackedLinear(linear)(hidden)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="established on AVX-512 only")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """A sequence must decode alike alone and in a batch: the single-row kernel sums long rows in another order."""
    packed = PackedLinear(random_linear(1536, 64, dtype, bias=False))
    hidden = torch.randn(64, 1536, dtype=dtype)
    with torch.inference_mode():
        together = packed(hidden)
        for count in (1, 2, 3, 7, 33):
            assert torch.equal(packed(hidden[:count]), together[:count]), f"{count} rows"


class _CustomLinear(nn.Linear):
    """Computes something of its own."""


def test_only_plain_layers_are_replaced() -> None:
    """A subclass may do more than a product; an embedding tied to the output is still looked up by row."""
    model = nn.Module()
    model.embedding = nn.Embedding(12, 8)
    model.head = nn.Linear(8, 12, bias=False)
    model.head.weight = model.embedding.weight
    model.layers = nn.ModuleList([nn.Linear(8, 8), _CustomLinear(8, 8), nn.Linear(8, 8, dtype=torch.float16)])
    weight = model.embedding.weight.detach().clone()
    assert pack_linears(model) == 2
    assert isinstance(model.head, PackedLinear)
    assert [type(layer) for layer in model.layers] == [PackedLinear, _CustomLinear, nn.Linear]
    assert torch.equal(model.embedding(torch.arange(12)), weight)
    torch.testing.assert_close(model.head(torch.eye(8)), weight.t())


def test_weights_can_be_asked_for_their_dtype() -> None:
    """Some models look at a layer's weight before they call it."""
    packed = PackedLinear(random_linear(8, 12, torch.float32, bias=False))
    assert (packed.weight.dtype, packed.weight.device.type) == (torch.float32, "cpu")
    assert packed.weight.shape == (12, 8)


GROWTH = """
import engine, psutil, torch
from torch import nn
from engine.packed_linear import PackedLinear
torch.set_num_threads(1)
layers = [PackedLinear(nn.Linear(576, n, bias=False, dtype=torch.bfloat16)) for n in (576, 960, 3072)]
def run(rows):
    for layer in layers:
        layer(torch.zeros(rows, 576, dtype=torch.bfloat16))
with torch.inference_mode():
    run(16)
    before = psutil.Process().memory_info().rss
    for rows in range(17, 317):
        run(rows)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 instructions")
def test_prompts_of_all_lengths_do_not_fill_the_memory_with_compiled_kernels() -> None:
    """A kernel is compiled for each number of rows: 1,024 of them were kept, by two caches, and the engine grew."""
    limits = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environ = {name: value for name, value in os.environ.items() if name not in limits}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", GROWTH], cwd=root, env=environ, capture_output=True, check=True)
    assert int(done.stdout) < 250 << 20
