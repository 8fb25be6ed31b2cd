"""8-bit KV in plain torch and on the CPU: what is stored, what is read, and who has scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.cpu import CpuAttention
from kernels.dispatch import select_kernels, why_not_kv_dtype
from kernels.heuristics import DeviceModel
from kernels.quantization import LARGEST_ELEMENT, quantize, widen
from tests.kernels.paged_case import LAYER, SHAPES, PagedCase, Shape, build_case

EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def quantized_case(shape: Shape, dtype: torch.dtype) -> tuple[PagedCase, torch.Tensor, torch.Tensor]:
    """The case over 8-bit elements, its scales, and what the elements stand for. Unowned slots hold the largest."""
    case = build_case(shape)
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(case.kv_cache.shape[1], 2, shape.num_kv_heads, generator=generator) * 0.02 + 0.01
    wide = scales[None, :, :, None, :, None]
    case.kv_cache = (case.kv_cache.float() / wide).nan_to_num(nan=LARGEST_ELEMENT[dtype]).clamp(-100, 100).to(dtype)
    return case, scales, case.kv_cache.float() * wide


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("name", ["smollm2", "only_decode", "sinks_cap_window", "empty_rows", "block_size_5"])
@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_the_elements_stand_for(name: str, dtype: torch.dtype, query: torch.dtype) -> None:
    """Scales of another layer, of V instead of K, or of another head give other answers."""
    case, scales, wide = quantized_case(replace(SHAPES[name], dtype=query), dtype)
    outputs = [
        case.run(select_kernels(CPU, kernels, kv_scales=scales).paged_attention) for kernels in ("cpu", "reference")
    ]
    case.kv_cache = wide
    expected = case.run(reference.paged_attention).double()
    # As in test_cpu.py; in bf16 a scale, the query times a scale, and a result times a scale are rounded as well.
    tolerance = {torch.float32: 4e-6 * max(1.0, case.shape.score_size), torch.bfloat16: 3 * 2.0**-7}[query]
    for output in outputs:
        assert output.dtype == query
        torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=tolerance * float(wide.abs().max()))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("cuts", [(130,), (1, 129), (64, 3, 63), (129, 1)], ids=str)
def test_a_row_has_the_same_bits_however_its_sequence_was_cut(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    """I7 to the bit, for the default model's heads: a prefix that is found was computed in other cuts."""
    case, scales, _ = quantized_case(
        Shape(lengths=((0, 130),), num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16), dtype
    )
    whole = case.run(CpuAttention(scales).paged_attention)
    table, query = case.metadata.host_block_tables[0], case.query
    kernels, start = CpuAttention(scales), 0
    for new in cuts:
        case.metadata = case.metadata.build([table], [start], [new], 16, CPU)
        case.query = query[start : start + new]
        assert torch.equal(case.run(kernels.paged_attention), whole[start : start + new])
        start += new


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_store_rounds_to_even_and_limits(name: str, dtype: torch.dtype) -> None:
    """fp8 e4m3 has no infinity: a key past its range that is not limited is stored as NaN, and spoils its sequence."""
    scales = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.5, 2.0], [4.0, 0.25]]])
    kv_cache = torch.zeros(3, 2, 2, 4, 2, 6, dtype=dtype)
    values = torch.tensor([0.0, 2.5, -3.5, 1e6, -1e6, 17.0])
    key = (values * scales[1, 0][:, None]).expand(1, 2, 6)
    value = (values * scales[1, 1][:, None]).expand(1, 2, 6)
    select_kernels(CPU, name, kv_scales=scales).store_kv(key, value, kv_cache, LAYER, torch.tensor([9]))
    # 17 lies between fp8's 16 and 18.
    expected = {torch.int8: [0, 2, -4, 127, -127, 17], torch.float8_e4m3fn: [0, 2.5, -3.5, 448, -448, 16]}[dtype]
    assert kv_cache[2, 1, :, 1].float().tolist() == [[expected, expected]] * 2
    assert int(kv_cache.view(torch.int8).count_nonzero()) == 4 * 5


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_widened_is_what_was_stored_to_half_a_step(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(0))
    scales = rows.abs().amax((0, 2)) / LARGEST_ELEMENT[dtype]
    wide = widen(quantize(rows, scales, dtype), scales)
    step = scales[:, None] if dtype == torch.int8 else torch.maximum(rows.abs() / 8, scales[:, None] * 2.0**-9)
    assert bool(((wide - rows).abs() <= step / 2 * 1.0001).all())


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.int8, False), (torch.float32, True)])
def test_scales_without_need_and_need_without_scales_are_refused(name: str, dtype: torch.dtype, scaled: bool) -> None:
    kernels = select_kernels(CPU, name, kv_scales=torch.ones(3, 2, 2) if scaled else None)
    case = build_case(Shape())
    case.kv_cache = case.kv_cache.nan_to_num().to(dtype)
    with pytest.raises(ValueError, match="8-bit elements, and only they"):
        case.run(kernels.paged_attention)
    with pytest.raises(ValueError, match="8-bit elements, and only they"):
        kernels.store_kv(case.keys[0], case.values[0], case.kv_cache, LAYER, torch.arange(5))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32, *EIGHT_BITS], ids=str)
def test_a_cpu_keeps_any_type(kv_dtype: torch.dtype) -> None:
    """With other types of 16 and 32 bits the reference's answer, as far as the type holds the values."""
    assert why_not_kv_dtype(CPU, torch.bfloat16, kv_dtype) is None
    if kv_dtype.itemsize == 1:
        return
    for query in (torch.float32, torch.bfloat16):
        case = build_case(replace(SHAPES["smollm2"], dtype=query))
        case.kv_cache = case.kv_cache.to(kv_dtype)
        output, expected = case.run(CpuAttention().paged_attention), case.run(reference.paged_attention)
        tolerance = 3 * 2.0**-8 if query == torch.bfloat16 else 4e-6
        torch.testing.assert_close(
            output.double(), expected.double(), rtol=0.0, atol=tolerance * case.largest_value, equal_nan=False
        )


@pytest.mark.parametrize(
    ("capability", "model", "kv", "reason"),
    [
        ((9, 0), torch.bfloat16, torch.bfloat16, None),
        ((9, 0), torch.float32, torch.float32, None),
        ((9, 0), torch.bfloat16, torch.float8_e4m3fn, None),
        ((8, 0), torch.float16, torch.int8, None),
        ((8, 9), torch.bfloat16, torch.float8_e4m3fn, None),
        ((8, 0), torch.bfloat16, torch.float8_e4m3fn, "8.9"),
        ((9, 0), torch.float32, torch.int8, "bf16"),
        ((9, 0), torch.bfloat16, torch.float16, "the model's own type"),
    ],
)
def test_a_gpu_keeps_what_was_compiled_for_it(
    capability: tuple[int, int],
    model: torch.dtype,
    kv: torch.dtype,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 bits beside an fp32 model spill, and take more shared memory than there is."""
    monkeypatch.setattr(DeviceModel, "of", lambda device: DeviceModel(132, capability))
    answer = why_not_kv_dtype(CUDA, model, kv)
    assert (answer is None) if reason is None else (answer is not None and reason in answer)
