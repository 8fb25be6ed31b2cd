"""The kernels as the GPU runs them, in bf16 too, against the reference: what interpreter and compiler cannot show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import reference
from kernels.block_copier import BlockCopier
from kernels.heuristics import DeviceModel
from kernels.metadata import AttentionMetadata
from kernels.triton_attention import TritonAttention
from tests.kernels.paged_case import SHAPES, PagedCase, Shape, build_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE = {
    "decode_splits": Shape(lengths=((5000, 1), (40, 1), (900, 1)), head_dim=128, group=4, block_size=16),
    "several_tokens": Shape(lengths=((5000, 8), (40, 5), (257, 2)), head_dim=64, group=8, block_size=16),
    "prefill": Shape(lengths=((700, 300), (0, 513)), head_dim=128, group=4, block_size=16),
    "mixed": Shape(lengths=((700, 300), (900, 1), (0, 0), (90, 7)), head_dim=96, group=3, block_size=32),
    "window": Shape(lengths=((3000, 1), (500, 200)), head_dim=256, group=2, sliding_window=512, soft_cap=50.0),
    "block_256": Shape(lengths=((3000, 1), (500, 200)), head_dim=80, block_size=256, sinks=True),
}


# In fp32 every shape; in the other types those whose tiles, loops and options differ. Each is a variant to compile.
NARROW = (*LARGE, "smollm2", "head_dim_80", "gemma_head_dim_256", "odd_head_dim", "sinks_cap_window")
CASES = [(name, torch.float32) for name in (*SHAPES, *LARGE)]
CASES += [(name, dtype) for dtype in (torch.float16, torch.bfloat16) for name in NARROW]


def _on(device: str, case: PagedCase) -> PagedCase:
    lengths = case.shape.lengths
    return replace(
        case,
        kv_cache=case.kv_cache.to(device),
        query=case.query.to(device),
        sinks=None if case.sinks is None else case.sinks.to(device),
        metadata=AttentionMetadata.build(
            case.metadata.host_block_tables,
            [cached for cached, _ in lengths],
            [new for _, new in lengths],
            case.shape.block_size,
            device,
        ),
    )


def _launch(name: str, dtype: torch.dtype, device: DeviceModel) -> None:
    case = build_case(replace((SHAPES | LARGE)[name], dtype=dtype))
    _on("meta", case).run(TritonAttention(device).paged_attention)


def launches(device: DeviceModel) -> list[Callable[[], None]]:
    """What these tests launch, over tensors without content: `bench.warm_kernels` compiles it beforehand."""
    return [partial(_launch, name, dtype, device) for name, dtype in CASES]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_named_shapes_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    case = build_case(replace((SHAPES | LARGE)[name], dtype=dtype))
    expected = case.run(reference.paged_attention)
    output = _on("cuda", case).run(TritonAttention(DeviceModel.of(torch.device("cuda"))).paged_attention)
    tolerance = {
        torch.float32: 1e-5 * max(1.0, case.shape.score_size),
        torch.float16: 2.0**-9,
        torch.bfloat16: 3 * 2.0**-8,
    }[dtype]
    torch.testing.assert_close(
        output.cpu().double(), expected.double(), rtol=0.0, atol=tolerance * case.largest_value, equal_nan=False
    )


def test_a_captured_step_is_right_for_other_lengths() -> None:
    """The grid and the buffers of a captured step do not depend on the lengths: a replay with longer ones is right."""
    case = _on("cuda", build_case(Shape(lengths=((40, 1), (3000, 1)), head_dim=64, block_size=16, dtype=torch.float16)))
    kernels = TritonAttention(DeviceModel.of(torch.device("cuda")), shares_prefixes=False)
    long, short = case.metadata, replace(case.metadata, seq_lens=torch.full_like(case.metadata.seq_lens, 20))
    case.metadata = short
    case.run(kernels.paged_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.run(kernels.paged_attention)
    short.seq_lens.copy_(long.seq_lens)
    graph.replay()
    case.metadata = long
    expected = case.run(kernels.paged_attention)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_moves_keep_every_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (50, 4, 2, 16, 2, 64 * dtype.itemsize), dtype=torch.uint8, device="cuda")
    kv_cache = bits.clone().view(dtype)
    staging = torch.empty_like(kv_cache[:3])
    BlockCopier().gather_blocks(kv_cache, [40, 2, 17], staging)
    assert torch.equal(staging.view(torch.uint8), bits[[40, 2, 17]])
    BlockCopier().scatter_blocks(staging, kv_cache, [0, 49, 30])
    assert torch.equal(kv_cache.view(torch.uint8)[[0, 49, 30]], bits[[40, 2, 17]])
