"""The checks themselves, run in the interpreter's process."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kernels import reference, triton_attention
from kernels.block_copier import BlockCopier, BlockMove
from kernels.heuristics import DeviceModel, select_tile
from kernels.metadata import AttentionMetadata, StepPlan
from kernels.rerotation import RotationTable, rerotate
from kernels.shared_prefix import find_groups
from kernels.triton_attention import TritonAttention
from tests.kernels.paged_case import LAYER, PagedCase, Shape, build_case

# Few multiprocessors: the interpreter runs every program, and a small case must still be cut into several parts.
SMALL_DEVICE = DeviceModel(num_sms=1, capability=(9, 0))
# Many: keys are cut as finely as they ever are.
LARGE_DEVICE = DeviceModel(num_sms=16, capability=(9, 0))


@dataclass(frozen=True)
class Copy:
    src: int
    dst: int
    num_slots: int


def key_bytes(kv_cache: torch.Tensor) -> int:
    """Of a key and its value, in all heads of a layer."""
    return kv_cache[0, 0, :, 0].nbytes


def check_attention(shape: Shape, device: DeviceModel = SMALL_DEVICE) -> None:
    case = build_case(shape)
    assert_close(case, case.run(TritonAttention(device).paged_attention))


def assert_close(case: PagedCase, output: torch.Tensor, tolerance: float = 0.0) -> None:
    assert output.dtype == case.shape.dtype
    expected = case.run(reference.paged_attention)
    # Of the largest value. fp32: two orders of summation, scores of size s. fp16: the weights are rounded to fp16
    # before they meet the values (2^-11 of each), and both results are rounded.
    tolerance = (
        tolerance
        or {
            torch.float32: 4e-6 * max(1.0, case.shape.score_size),
            torch.float16: 2.0**-9,
        }[case.shape.dtype]
    )
    torch.testing.assert_close(
        output.double(), expected.double(), rtol=0.0, atol=tolerance * case.largest_value, equal_nan=False
    )


def check_transposed_query(shape: Shape) -> None:
    case = build_case(shape)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(case, case.run(TritonAttention(SMALL_DEVICE).paged_attention))


def check_keys_before_the_window_are_not_read(shape: Shape) -> None:
    """Their blocks may belong to another sequence by now: NaN there, and table entries that lead to NaN."""
    case = build_case(shape)
    assert shape.sliding_window is not None
    for index, (cached, _) in enumerate(shape.lengths):
        table = case.metadata.host_block_tables[index]
        first = reference.first_visible_key(cached, shape.sliding_window)
        for position in range(first):
            case.kv_cache[table[position // shape.block_size], :, :, position % shape.block_size] = torch.nan
        # Block 0 is nobody's, and all NaN.
        case.metadata.block_table[index, : first // shape.block_size] = 0
    assert_close(case, case.run(TritonAttention(SMALL_DEVICE).paged_attention))


def check_one_instance_over_steps(shapes: Sequence[Shape]) -> None:
    kernels = TritonAttention(SMALL_DEVICE)
    for shape in shapes:
        case = build_case(shape)
        assert_close(case, case.run(kernels.paged_attention))
        assert_close(case, case.run(kernels.paged_attention))


def check_offsets_past_32_bits() -> None:
    """A cache of more than 2^31 elements, of which only the last blocks are ever touched."""
    shape = (70_000, 2, 2, 16, 4, 128)
    assert torch.Size(shape).numel() > 2**31
    kv_cache = torch.empty(shape, dtype=torch.float16)
    generator = torch.Generator().manual_seed(0)
    tables = [[69_999, 69_990, 3], [69_991, 5]]
    metadata = AttentionMetadata.build(tables, [0, 20], [40, 1], 16, "cpu")
    kernels = TritonAttention(SMALL_DEVICE)
    before = AttentionMetadata.build(tables[1:], [0], [20], 16, "cpu")
    for step in (before, metadata):
        rows = torch.randn(2, step.slot_mapping.shape[0], 4, 128, generator=generator).half()
        kernels.store_kv(rows[0], rows[1], kv_cache, LAYER, step.slot_mapping)
        assert torch.equal(kv_cache[step.slot_mapping // 16, LAYER, 0, step.slot_mapping % 16], rows[0])
    query = torch.randn(41, 8, 128, generator=generator).half()
    arguments = {"scale": 0.09, "sliding_window": None, "soft_cap": None, "sinks": None}
    output = kernels.paged_attention(query, kv_cache, LAYER, metadata, **arguments)
    expected = reference.paged_attention(query, kv_cache, LAYER, metadata, **arguments)
    torch.testing.assert_close(output, expected, rtol=0.0, atol=2.0**-7, equal_nan=False)
    staging = torch.empty(1, *shape[1:], dtype=torch.float16)
    BlockCopier().gather_blocks(kv_cache, [69_999], staging)
    assert torch.equal(staging[0, LAYER], kv_cache[69_999, LAYER])
    BlockCopier().copy_blocks(kv_cache, [(69_999, 69_998)])
    assert torch.equal(kv_cache[69_998, LAYER], kv_cache[69_999, LAYER])


def check_padded_rows(dtype: torch.dtype) -> None:
    """Rows and sequences that fill up a captured batch: no new tokens, slots of -1, an earlier step's table entries."""
    shape = Shape(lengths=((5, 1), (9, 1)), dtype=dtype)
    case = build_case(shape)
    metadata = case.metadata
    stale = torch.full((2, metadata.block_table.shape[1]), 1, dtype=torch.int32)
    padded = replace(
        metadata,
        block_table=torch.cat([metadata.block_table, stale]),
        slot_mapping=torch.cat([metadata.slot_mapping, torch.tensor([-1, -1])]),
        cu_seqlens_q=torch.cat([metadata.cu_seqlens_q, torch.tensor([2, 2], dtype=torch.int32)]),
        seq_lens=torch.cat([metadata.seq_lens, torch.tensor([7, 0], dtype=torch.int32)]),
        host_query_lens=[1, 1, 0, 0],
        host_seq_lens=[*metadata.host_seq_lens, 7, 0],
        host_block_tables=[*metadata.host_block_tables, array("i", [1, 1]), array("i")],
    )
    rows = torch.full((4, shape.num_kv_heads, shape.head_dim), 777.0, dtype=dtype)
    kernels = TritonAttention(SMALL_DEVICE)
    expected = case.kv_cache.clone()
    reference.store_kv(rows[:2], rows[:2], expected, LAYER, metadata.slot_mapping)
    kernels.store_kv(rows, rows, case.kv_cache, LAYER, padded.slot_mapping)
    assert torch.equal(case.kv_cache.nan_to_num(5.0), expected.nan_to_num(5.0))

    expected_rows = case.run(reference.paged_attention)
    case.query = torch.cat([case.query, torch.full_like(case.query, torch.nan)])
    case.metadata = padded
    output = case.run(kernels.paged_attention)[:2]
    torch.testing.assert_close(output, expected_rows, rtol=0.0, atol=2.0**-9 * 777)


def check_quantized(dtype: torch.dtype, shape: Shape, device: DeviceModel = SMALL_DEVICE) -> None:
    """8-bit keys and values with a scale a layer, K or V, and head; the reference reads them widened."""
    case = build_case(shape)
    scales, wide = quantize_case(case, dtype)
    output = case.run(TritonAttention(device, kv_scales=scales).paged_attention)
    case.kv_cache = wide
    assert_close(case, output, tolerance=2.0**-8)


def quantize_case(case: PagedCase, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Its cache in 8 bits; the scales, and what the elements stand for. NaN, which int8 has none of, becomes large."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(case.kv_cache.shape[1], 2, case.kv_cache.shape[4], generator=generator) * 0.02 + 0.01
    wide = scales[None, :, :, None, :, None]
    case.kv_cache = (case.kv_cache.float() / wide).nan_to_num(nan=100.0).clamp(-120, 120).to(dtype)
    return scales, case.kv_cache.float() * wide


def check_quantized_store(dtype: torch.dtype) -> None:
    scales = torch.tensor([[[0.5, 2.0], [4.0, 0.25]]])
    kv_cache = torch.zeros(3, 1, 2, 4, 2, 16, dtype=dtype)
    # None rounds up to a power of two: the interpreter loses the carry from an fp8 mantissa into the exponent.
    values = torch.tensor([0.0, 1, -1.3, 17.1, -20.2, 1e6, -1e6, 0.26, 3.3, -0.51, 100.3, -110.7, 5.2, 6.6, 9.2, 1.06])
    key = (values[None, None] * torch.tensor([0.5, 2.0])[None, :, None]).expand(2, 2, 16)
    value = (values[None, None] * torch.tensor([4.0, 0.25])[None, :, None]).expand(2, 2, 16)
    TritonAttention(SMALL_DEVICE, kv_scales=scales).store_kv(
        key.contiguous(), value.contiguous(), kv_cache, 0, torch.tensor([9, 2])
    )
    expected = values.round().clamp(-127, 127) if dtype == torch.int8 else values.clamp(-448, 448)
    for block, slot in ((2, 1), (0, 2)):
        assert torch.equal(kv_cache[block, 0, :, slot], expected.to(dtype).expand(2, 2, 16))


def check_scales_are_refused(kv_dtype: torch.dtype, with_scales: bool, capability: tuple[int, int]) -> str:
    """The message of the ValueError, so that the caller can see which of the two was meant."""
    scales = torch.ones(1, 2, 2) if with_scales else None
    kernels = TritonAttention(DeviceModel(1, capability), kv_scales=scales)
    row = torch.zeros(1, 2, 16)
    try:
        kernels.store_kv(row, row, torch.zeros(3, 1, 2, 4, 2, 16).to(kv_dtype), 0, torch.tensor([0]))
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def check_store(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every element different, so that a write to a wrong place cannot go unseen."""
    block_size, num_kv_heads, head_dim = shape
    size = torch.Size((7, 3, 2, *shape))
    kv_cache = torch.arange(size.numel(), dtype=torch.float32).view(size).to(dtype)
    expected = kv_cache.clone()
    slots = torch.tensor([5 * block_size + block_size - 1, 2 * block_size, 6 * block_size, block_size])
    key = torch.randn(4, num_kv_heads, head_dim).to(dtype)
    value = torch.randn(num_kv_heads, 4, head_dim).to(dtype).transpose(0, 1)
    reference.store_kv(key, value, expected, 1, slots)
    TritonAttention(SMALL_DEVICE).store_kv(key, value, kv_cache, 1, slots)
    assert torch.equal(kv_cache, expected)


@dataclass(frozen=True)
class PrefixShape:
    """`owners`: for each sequence, how many keys of the common prompt it shares, and how many of its own follow."""

    owners: Sequence[tuple[int, int]]
    new: Sequence[int]
    dtype: torch.dtype = torch.float32
    group: int = 3
    soft_cap: float | None = None
    sinks: bool = False
    sliding_window: int | None = None
    kv_dtype: torch.dtype | None = None  # of 8 bits, with scales


def check_shared_prefix(shape: PrefixShape, shared: bool) -> None:
    """`shared`: whether the kernels are to find a group that pays."""
    block_size, num_kv_heads, head_dim, common = 16, 2, 16, list(range(1, 40))
    tables: list[list[int]] = []
    next_block = 50
    for prefix, own in shape.owners:
        assert prefix % block_size == 0
        count = -(-own // block_size)
        tables.append(common[: prefix // block_size] + list(range(next_block, next_block + count)))
        next_block += count
    lens = [prefix + own for prefix, own in shape.owners]
    generator = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(
        next_block, 2, 2, block_size, num_kv_heads, head_dim, generator=generator, dtype=torch.float64
    ).to(shape.dtype)
    for table, length in zip(tables, lens, strict=True):
        kv_cache[table[-1], :, :, (length - 1) % block_size + 1 :] = torch.nan
    cached = [length - new for length, new in zip(lens, shape.new, strict=True)]
    metadata = AttentionMetadata.build(tables, cached, shape.new, block_size, "cpu")
    num_heads = num_kv_heads * shape.group
    query = torch.randn(sum(shape.new), num_heads, head_dim, generator=generator).to(shape.dtype)
    sinks = torch.randn(num_heads, generator=generator).to(shape.dtype) if shape.sinks else None
    arguments = {"scale": 0.25, "sliding_window": shape.sliding_window, "soft_cap": shape.soft_cap, "sinks": sinks}
    scales = None
    if shape.kv_dtype is not None:
        kv_cache = (kv_cache.float() * 30).round().nan_to_num(nan=127.0).clamp(-127, 127).to(shape.kv_dtype)
        scales = torch.rand(2, 2, num_kv_heads, generator=generator) * 0.02 + 0.02

    kernels = TritonAttention(SMALL_DEVICE, kv_scales=scales, min_shared_saving=256 * key_bytes(kv_cache))
    output = kernels.paged_attention(query, kv_cache, 1, metadata, **arguments)
    assert kernels.shares_now == shared
    expected = reference.paged_attention(query, kv_cache, 1, metadata, **arguments, kv_scales=scales)
    tolerance = {torch.float32: 1e-5, torch.float16: 2.0**-7}[shape.dtype]
    torch.testing.assert_close(output, expected, rtol=0.0, atol=tolerance, equal_nan=False)


@dataclass(frozen=True)
class Replay:
    """One step of a captured batch: `owners` as in `PrefixShape`, by sequence; the rest of the batch is padding."""

    owners: Sequence[tuple[int, int]]
    shared: bool  # whether the kernels are to find a group that pays


def check_captured_prefixes(
    size: int, replays: Sequence[Replay], device: DeviceModel, group: int, kv_dtype: torch.dtype | None
) -> None:
    """A graph is what the kernels launch for one metadata, again over the same tensors: nothing of the host's is read.

    Captured with nothing in the batch; then each replay finds in its tensors what was put there, and stale numbers of
    the replay before behind it. The tables of all members of a group, but the first of a tile, lead to wrong keys where
    its prefix is: whoever reads it for itself shows.
    """
    block_size, num_kv_heads, head_dim, width, num_blocks = 16, 2, 16, 48, 400
    generator = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(num_blocks, 2, 2, block_size, num_kv_heads, head_dim, generator=generator).half()
    scales = None
    if kv_dtype is not None:
        kv_cache = (kv_cache.float() * 30).round().clamp(-120, 120).to(kv_dtype)
        scales = torch.rand(2, 2, num_kv_heads, generator=generator) * 0.02 + 0.02
    kv_cache[0] = 127 if kv_dtype == torch.int8 else torch.nan
    num_heads = num_kv_heads * group
    query = torch.zeros(size, num_heads, head_dim, dtype=torch.float16)
    inputs = AttentionMetadata(
        block_table=torch.zeros(size, width, dtype=torch.int32),
        slot_mapping=torch.full((size,), -1),
        cu_seqlens_q=torch.zeros(size + 1, dtype=torch.int32),
        seq_lens=torch.zeros(size, dtype=torch.int32),
        host_block_tables=[array("i", [0])] * size,
        host_query_lens=[1] * size,
        host_seq_lens=[1] * size,
        block_size=block_size,
    )
    arguments = {"scale": 0.25, "sliding_window": None, "soft_cap": 8.0, "sinks": None}
    kernels = TritonAttention(device, kv_scales=scales, captured=True, min_shared_saving=256 * key_bytes(kv_cache))
    kernels.paged_attention(query, kv_cache, 1, inputs, **arguments)
    per_tile = select_tile(device, "shared_prefix", head_dim, kv_cache.dtype).block_m // group
    for replay in replays:
        num_seqs = len(replay.owners)
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        common, rest = order[:40], order[40:]
        tables: list[list[int]] = []
        for prefix, own in replay.owners:
            count = -(-own // block_size)
            tables.append(common[: prefix // block_size] + rest[:count])
            rest = rest[count:]
        lens = [prefix + own for prefix, own in replay.owners]
        metadata = AttentionMetadata.build(tables, [n - 1 for n in lens], [1] * num_seqs, block_size, "cpu")
        inputs.block_table[:num_seqs, : metadata.block_table.shape[1]] = metadata.block_table
        inputs.cu_seqlens_q[: num_seqs + 1] = metadata.cu_seqlens_q
        inputs.cu_seqlens_q[num_seqs + 1 :] = num_seqs
        inputs.seq_lens[:num_seqs] = metadata.seq_lens
        inputs.seq_lens[num_seqs:] = 0
        query[:num_seqs] = torch.randn(num_seqs, num_heads, head_dim, generator=generator).half()
        query[num_seqs:] = torch.nan
        plan = StepPlan.of(tables, [n - 1 for n in lens], [1] * num_seqs, block_size)
        groups = find_groups(plan.block_tables, plan.seq_lens, range(num_seqs), block_size, 256)
        assert kernels.stage_prefixes(plan, block_size) == bool(groups) == replay.shared
        if not replay.shared:
            continue  # the engine replays the graph that does not share
        for found in groups:
            others = [member for place, member in enumerate(found.members) if place % per_tile]
            inputs.block_table[others, : found.num_keys // block_size] = 0
        output = kernels.paged_attention(query, kv_cache, 1, inputs, **arguments)
        expected = reference.paged_attention(query[:num_seqs], kv_cache, 1, metadata, **arguments, kv_scales=scales)
        torch.testing.assert_close(output[:num_seqs], expected, rtol=0.0, atol=2.0**-7, equal_nan=False)


def fewest_members_that_share(num_kv_heads: int, head_dim: int, dtype: torch.dtype, captured: bool) -> int:
    """Of 256 keys, so that they are read once and 1 MiB is saved."""
    kv_cache = torch.empty(40, 1, 2, 16, num_kv_heads, head_dim, dtype=dtype, device="meta")
    scales = torch.empty(1, 2, num_kv_heads, device="meta") if dtype == torch.int8 else None
    for members in range(2, 80):
        tables = [[*range(16), 20]] * members
        metadata = AttentionMetadata.build(tables, [256] * members, [1] * members, 16, "meta")
        query = torch.empty(members, num_kv_heads, head_dim, dtype=torch.float16, device="meta")
        kernels = TritonAttention(SMALL_DEVICE, kv_scales=scales, captured=captured, min_shared_saving=1 << 20)
        with not_run():
            kernels.paged_attention(
                query, kv_cache, 0, metadata, scale=1.0, sliding_window=None, soft_cap=None, sinks=None
            )
        plan = StepPlan.of(tables, [256] * members, [1] * members, 16)
        if kernels.stage_prefixes(plan, 16) if captured else kernels.shares_now:
            return members
    raise AssertionError("they never share")


@contextmanager
def not_run() -> Iterator[None]:
    """Kernels are not launched: only what the host decides matters."""

    def nothing(*args: object, **options: object) -> None:
        pass

    original, triton_attention.launch = triton_attention.launch, nothing
    try:
        yield
    finally:
        triton_attention.launch = original


def check_only_a_captured_step_is_staged() -> None:
    """Before its capture, and in a set that is not captured, there is no list to put a step's groups into."""
    tables = [[*range(32), 40], [*range(32), 41]]
    plan = StepPlan.of(tables, [512, 512], [1, 1], 16)
    for kernels in (TritonAttention(SMALL_DEVICE), TritonAttention(SMALL_DEVICE, captured=True, min_shared_saving=1)):
        assert not kernels.stage_prefixes(plan, 16)


def check_copies(shape: tuple[int, int, int], dtype: torch.dtype, copies: Sequence[Copy]) -> None:
    bits = torch.randint(0, 256, (9, 3, 2, *shape[:2], shape[2] * dtype.itemsize), dtype=torch.uint8)
    expected = bits.view(dtype).clone()
    actual = expected.clone()
    reference.copy_slots(expected, copies)
    BlockCopier().copy_slots(actual, copies)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def check_gather_and_scatter(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Compared as bytes: every NaN keeps its own bits."""
    bits = torch.randint(0, 256, (9, 3, 2, *shape[:2], shape[2] * dtype.itemsize), dtype=torch.uint8)
    kv_cache = bits.view(dtype)
    staging = torch.zeros(3, *kv_cache.shape[1:]).to(dtype)
    BlockCopier().gather_blocks(kv_cache, [7, 2, 5], staging)
    assert torch.equal(staging.view(torch.uint8), bits[[7, 2, 5]])
    expected = bits.clone()
    expected[[0, 8, 3]] = bits[[7, 2, 5]]
    BlockCopier().scatter_blocks(staging, kv_cache, [0, 8, 3])
    assert torch.equal(kv_cache.view(torch.uint8), expected)


def check_rerotate(head_dim: int, half: int, dtype: torch.dtype) -> None:
    kv_cache = torch.randn(6, 2, 2, 4, 3, head_dim).to(dtype)
    expected, actual = kv_cache.clone(), kv_cache.clone()
    table = RotationTable.build(torch.rand(2, half), [5, -100_000])
    rerotate(expected, 1, 2, table, 0)
    rerotate(expected, 3, 5, table, 1)
    BlockCopier().rerotate_blocks(actual, [BlockMove(1, 2, 0), BlockMove(3, 5, 1)], table)
    tolerance = {torch.float32: 1e-6, torch.float16: 2.0**-9}[dtype]
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance * 4)


def check_rerotated_keys_are_the_keys_of_the_new_position() -> None:
    """RoPE at p + delta, written out, from unrotated keys; over a delta at which fp32 angles would be off by 0.004."""
    half, position, delta = 8, 17, 100_000
    inv_freq = (10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)).expand(1, half)
    plain = torch.randn(4, 2, 2 * half, dtype=torch.float64)

    def rope(start: int) -> torch.Tensor:
        angles = (start + torch.arange(4, dtype=torch.float64))[:, None, None] * inv_freq
        x, y = plain[..., :half], plain[..., half:]
        return torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -1).float()

    kv_cache = torch.zeros(2, 1, 2, 4, 2, 2 * half)
    kv_cache[0, 0, 0] = rope(position)
    table = RotationTable.build(inv_freq, [delta])
    BlockCopier().rerotate_blocks(kv_cache, [BlockMove(0, 1, 0)], table)
    torch.testing.assert_close(kv_cache[1, 0, 0], rope(position + delta), rtol=0.0, atol=5e-6)
