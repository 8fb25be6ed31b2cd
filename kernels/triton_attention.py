"""The attention kernels for CUDA devices: which of the Triton kernels run for a step, and over which grid.

    paged_attention   sequences with 1 … 8 new tokens     paged_decode, reduce_splits   (triton_decode)
                      of these, groups on one prefix      shared_prefix_decode          (triton_shared_prefix)
                      sequences with more                 paged_prefill                 (triton_prefill)

A step may hold all three kinds: each kernel skips the sequences that are not its own, by their lengths on the device,
so no list of them is made. What the host decides (which kernels, how many tiles, which groups) follows from the
metadata's host lists and is the same for every layer of a step: it is kept with the metadata that it was made for.

Grids depend on the number of sequences and on prefill's tiles, never on how long a decoding sequence is: a step that
only decodes can be captured in a graph and replayed with other lengths. The work list of shared prefixes is the host's.
A captured step does without (`shares_prefixes=False`), or has room for any (`captured=True`): its grid has as many
items as there can be, those without members do nothing, and `stage_prefixes` fills its list before each replay.

What does not hold: a sequence's decode result depends on the batch around it, in the last bits, since the cut of its
keys does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton

from kernels.block_copier import BlockCopier
from kernels.heuristics import (
    DeviceModel,
    KernelName,
    Tile,
    TileTable,
    scan_size,
    select_tile,
    target_items,
)
from kernels.launch import launch
from kernels.metadata import AttentionMetadata, StepPlan
from kernels.quantization import check_scales
from kernels.reference import SlotCopy
from kernels.shared_prefix import PrefixGroup, PrefixPlan, PrefixRoom, find_groups, plan_prefixes
from kernels.tile_table import TILES
from kernels.triton_decode import paged_decode, reduce_splits
from kernels.triton_prefill import paged_prefill
from kernels.triton_shared_prefix import shared_prefix_decode
from kernels.triton_store import store_rows
from kernels.upload import upload

MAX_DECODE_QUERY = 8  # new tokens of a sequence that decode takes
_STORE_ELEMENTS = 2048  # of keys, and as many of values, a program
_MERGED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """What the host decided for one step."""

    metadata: AttentionMetadata
    max_query: int  # of the decoding sequences; 0: none decodes
    prefill_tiles: int
    prefixes: PrefixPlan | None


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where a captured step reads its shared prefixes."""

    room: PrefixRoom
    members_per_tile: int
    target_items: int
    key_bytes: int
    prefixes: PrefixPlan


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    layer: int
    metadata: AttentionMetadata
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[4]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_cache.shape[4]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def key_bytes(self) -> int:
        """Of one key and its value, in all KV heads of a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_cache.element_size()

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))


class TritonAttention:
    """The kernels for one KV cache on one CUDA device. For one thread: the plan of the last step is kept.

    With `captured`, for one step that is captured, and for no other.
    """

    def __init__(
        self,
        device: DeviceModel,
        *,
        kv_scales: torch.Tensor | None = None,  # fp32 [num_layers, 2, num_kv_heads], for a cache of 8-bit elements
        shares_prefixes: bool = True,
        captured: bool = False,
        min_shared_saving: int | None = None,  # bytes; None: the table's
        tiles: TileTable = TILES,
    ) -> None:
        self._device = device
        self._kv_scales = kv_scales
        self._shares_prefixes = shares_prefixes
        self._captured = captured
        self._stage: _Stage | None = None
        self._min_shared_saving = device.min_shared_saving if min_shared_saving is None else min_shared_saving
        self._tiles = tiles
        self._plan: _StepPlan | None = None
        self._copier = BlockCopier()

    @property
    def shares_now(self) -> bool:
        """Whether sequences of the last step had a prefix in common that pays."""
        return self._plan is not None and self._plan.prefixes is not None

    def stage_prefixes(self, plan: StepPlan, block_size: int) -> bool:
        """Put what a step's sequences share where the captured step reads it. False, and nothing is done, where they
        share nothing that pays: such a step is for a capture that does not share."""
        stage = self._stage
        if stage is None:
            return False
        groups = self._groups(plan.block_tables, plan.seq_lens, plan.query_lens, block_size, stage.key_bytes)
        if not groups:
            return False
        lists = plan_prefixes(groups, len(plan.seq_lens), stage.members_per_tile, stage.target_items)
        stage.prefixes.buffer.copy_(upload(lists.pack(stage.room), stage.prefixes.buffer.device))
        return True

    def _groups(
        self,
        block_tables: list[array[int]],
        seq_lens: list[int],
        query_lens: list[int],
        block_size: int,
        key_bytes: int,
    ) -> list[PrefixGroup]:
        decoding = [seq for seq, length in enumerate(query_lens) if length == 1]
        if len(decoding) < 2 or not self._shares_prefixes:
            return []
        min_keys = max(1, -(-self._min_shared_saving // key_bytes))
        return find_groups(block_tables, seq_lens, decoding, block_size, min_keys)

    def store_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,  # a negative slot is padding and is not written
    ) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        if num_tokens == 0:
            return
        self._check_cache(kv_cache)
        key, value = _rows(key), _rows(value)
        block_d = max(16, triton.next_power_of_2(head_dim))
        block_r = max(1, _STORE_ELEMENTS // block_d)
        launch(
            store_rows,
            (triton.cdiv(num_tokens * num_kv_heads, block_r),),
            key,
            value,
            kv_cache,
            slot_mapping,
            self._kv_scales,
            layer,
            num_tokens,
            kv_cache.shape[0] * kv_cache.shape[3],
            *_strides(key),
            *_strides(value),
            QUANTIZED=self._kv_scales is not None,
            INTEGER=kv_cache.dtype == torch.int8,
            NUM_LAYERS=kv_cache.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=4,
        )

    def copy_slots(self, kv_cache: torch.Tensor, copies: Iterable[SlotCopy]) -> None:
        self._copier.copy_slots(kv_cache, copies)

    def paged_attention(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"no kernel for {query.dtype}"
        self._check_cache(kv_cache)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if query.shape[0] == 0:
            return output
        call = _Call(_rows(query), kv_cache, output, layer, metadata, scale, sliding_window, soft_cap, sinks)
        plan = self._plan
        if plan is None or plan.metadata is not metadata:
            plan = self._plan = self._make_plan(call)
        if plan.prefill_tiles:
            self._prefill(call, plan.prefill_tiles)
        if plan.max_query:
            # A window is mostly shorter than what is shared; what it hides of a prefix would need a mask.
            self._decode(call, plan.max_query, plan.prefixes if sliding_window is None else None)
        return output

    def _check_cache(self, kv_cache: torch.Tensor) -> None:
        assert kv_cache.is_contiguous(), "the kernels compute a block's address from the cache's shape"
        check_scales(kv_cache, self._kv_scales)
        if kv_cache.dtype == torch.float8_e4m3fn and not self._device.has_fp8:
            raise ValueError("fp8 KV needs compute capability 8.9 or higher; int8 KV runs on this device")

    def _make_plan(self, call: _Call) -> _StepPlan:
        lens = call.metadata.host_query_lens
        rows = self._tile(call, "prefill").block_m
        return _StepPlan(
            metadata=call.metadata,
            max_query=max((length for length in lens if length <= MAX_DECODE_QUERY), default=0),
            prefill_tiles=sum(triton.cdiv(n * call.group, rows) for n in lens if n > MAX_DECODE_QUERY),
            prefixes=self._plan_prefixes(call),
        )

    def _plan_prefixes(self, call: _Call) -> PrefixPlan | None:
        metadata = call.metadata
        tile = self._tile(call, "shared_prefix")
        if call.group > tile.block_m:
            return None
        num_seqs, members_per_tile = len(metadata.host_seq_lens), tile.block_m // call.group
        target = target_items(self._device, call.num_kv_heads, 1)
        if self._captured:
            return self._stage_for(num_seqs, members_per_tile, target, call).prefixes
        groups = self._groups(
            metadata.host_block_tables,
            metadata.host_seq_lens,
            metadata.host_query_lens,
            metadata.block_size,
            call.key_bytes,
        )
        if not groups:
            return None
        lists = plan_prefixes(groups, num_seqs, members_per_tile, target)
        return PrefixPlan.of(upload(lists.pack(lists.room), call.query.device), lists.room)

    def _stage_for(self, num_seqs: int, members_per_tile: int, target: int, call: _Call) -> _Stage:
        """Made by the first run, which is not part of the capture: its memory stays where it is."""
        if self._stage is None:
            room = PrefixRoom.for_any(num_seqs, members_per_tile, target)
            with torch.inference_mode(False):
                buffer = torch.zeros(sum(room.sizes), dtype=torch.int32, device=call.query.device)
            self._stage = _Stage(room, members_per_tile, target, call.key_bytes, PrefixPlan.of(buffer, room))
        assert self._stage.room.num_seqs == num_seqs, "one instance for each captured step"
        return self._stage

    def _tile(self, call: _Call, kernel: KernelName) -> Tile:
        return select_tile(self._device, kernel, call.head_dim, call.kv_cache.dtype, self._tiles)

    def _decode_tile(self, call: _Call, num_rows: int) -> Tile:
        """The narrow tile where a sequence's rows fit it: it has room for more loads in flight."""
        narrow = self._tile(call, "decode")
        return narrow if num_rows <= narrow.block_m else self._tile(call, "decode_wide")

    def _prefill(self, call: _Call, num_tiles: int) -> None:
        metadata = call.metadata
        tile = self._tile(call, "prefill")
        num_seqs = metadata.seq_lens.shape[0]
        launch(
            paged_prefill,
            (call.num_kv_heads, num_tiles),
            call.query,
            call.kv_cache,
            call.output,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            call.sinks,
            self._kv_scales,
            call.layer,
            num_seqs,
            MAX_DECODE_QUERY + 1,
            metadata.block_table.stride(0),
            *_strides(call.query),
            call.scale,
            call.soft_cap or 0.0,
            call.sliding_window or 0,
            SEQS=scan_size(num_seqs),
            HAS_WINDOW=call.sliding_window is not None,
            HAS_SINKS=call.sinks is not None,
            **self._constants(call, tile),
        )

    def _decode(self, call: _Call, max_query: int, prefixes: PrefixPlan | None) -> None:
        metadata = call.metadata
        num_seqs = metadata.seq_lens.shape[0]
        num_heads = call.query.shape[1]
        tile = self._decode_tile(call, max_query * call.group)
        row_tiles = triton.cdiv(max_query * call.group, tile.block_m)
        target = target_items(self._device, call.num_kv_heads, row_tiles)
        partial_out, partial_lse = self._partials(call, (target + num_seqs) * max_query)
        prefix_lens = None if prefixes is None else prefixes.prefix_lens
        common = {"HAS_WINDOW": call.sliding_window is not None, "HAS_SINKS": call.sinks is not None}
        common |= {"HAS_PREFIX": prefixes is not None, "SEQS": scan_size(num_seqs)}
        launch(
            paged_decode,
            (call.num_kv_heads * row_tiles, target + num_seqs),
            call.query,
            call.kv_cache,
            call.output,
            partial_out,
            partial_lse,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            prefix_lens,
            call.sinks,
            self._kv_scales,
            call.layer,
            num_seqs,
            target,
            max_query,
            metadata.block_table.stride(0),
            *_strides(call.query),
            call.scale,
            call.soft_cap or 0.0,
            call.sliding_window or 0,
            **common,
            **self._constants(call, tile),
        )
        prefix_out, prefix_lse = (None, None) if prefixes is None else self._shared_prefix(call, prefixes)
        launch(
            reduce_splits,
            (num_heads, num_seqs * max_query),
            call.output,
            partial_out,
            partial_lse,
            prefix_out,
            prefix_lse,
            None if prefixes is None else prefixes.prefix_partials,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            prefix_lens,
            call.sinks,
            num_seqs,
            target,
            max_query,
            call.sliding_window or 0,
            NUM_HEADS=num_heads,
            HEAD_DIM=call.head_dim,
            BLOCK_N=tile.block_n,
            BLOCK_D=call.block_d,
            BLOCK_S=_MERGED_AT_ONCE,
            num_warps=4,
            **common,
        )

    def _shared_prefix(self, call: _Call, prefixes: PrefixPlan) -> tuple[torch.Tensor, torch.Tensor]:
        tile = self._tile(call, "shared_prefix")
        partial_out, partial_lse = self._partials(call, prefixes.num_partials)
        launch(
            shared_prefix_decode,
            (call.num_kv_heads, prefixes.items.shape[0]),
            call.query,
            call.kv_cache,
            partial_out,
            partial_lse,
            prefixes.items,
            prefixes.members,
            call.metadata.block_table,
            call.metadata.cu_seqlens_q,
            self._kv_scales,
            call.layer,
            call.metadata.block_table.stride(0),
            *_strides(call.query),
            call.scale,
            call.soft_cap or 0.0,
            **self._constants(call, tile),
        )
        return partial_out, partial_lse

    def _partials(self, call: _Call, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (count, call.query.shape[1])
        device = call.query.device
        return (
            torch.empty((*shape, call.block_d), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def _constants(self, call: _Call, tile: Tile) -> dict[str, int | bool | str]:
        """What the attention kernels have in common of compile-time constants and launch options."""
        return {
            "HAS_SOFT_CAP": call.soft_cap is not None,
            "QUANTIZED": self._kv_scales is not None,
            "NUM_LAYERS": call.kv_cache.shape[1],
            "NUM_KV_HEADS": call.num_kv_heads,
            "GROUP": call.group,
            "BLOCK_SIZE": call.kv_cache.shape[3],
            "HEAD_DIM": call.head_dim,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": call.block_d,
            "PRECISION": product_precision(call.query.dtype, call.block_d),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def product_precision(dtype: torch.dtype, block_d: int) -> str:
    """How `tl.dot` multiplies; it matters for fp32 only.

    Three tf32 products keep 21 bits of each factor, at the tensor cores' speed; one keeps 11. A head of 256 in three
    times two parts does not fit the registers, and is multiplied without tensor cores.
    """
    return "tf32x3" if dtype == torch.float32 and block_d <= 128 else "ieee"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last axis is contiguous; the others may have any strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(rows: torch.Tensor) -> tuple[int, int]:
    """Of tokens and of heads. That of a single one is never used, and torch leaves any number there: Triton would
    compile the kernel anew for one that is no multiple of 16."""
    num_tokens, num_heads, head_dim = rows.shape
    return (
        rows.stride(0) if num_tokens > 1 else num_heads * head_dim,
        rows.stride(1) if num_heads > 1 else head_dim,
    )
