"""Proof that what lies on disk is what the model computes.

    1. every payload is read again and its checksum compared; what fails is dropped, and counted
    2. of a sample of paths, every block is computed anew from its tokens, into blocks of its own, and compared

Computing anew is cut into the same chunks as a request's prefill. KV need not have the same bits all the same (another
batch, another number of rows), so the comparison has the dtype's tolerance.

Runs between two steps and holds the engine up meanwhile: it is an operator's tool.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from engine.batch import ScheduledSequence, SchedulerOutput
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import CacheVerified, SamplingParams, unpack_tokens
from engine.tiers.disk_tier import DiskTier


class VerifyingRunner(Protocol):
    def execute(self, output: SchedulerOutput) -> object: ...

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        """Whether a block's content and a payload agree within the dtype's tolerance."""
        ...


class Verification:
    """One run over the disk tier."""

    def __init__(
        self,
        manager: KVCacheManager,
        runner: VerifyingRunner,
        disk: DiskTier,
        chunk: int,
        carry_out_offloads: Callable[[], None],
    ) -> None:
        """`carry_out_offloads`: blocks that were evicted to make room leave before anything is computed into them."""
        self._manager = manager
        self._runner = runner
        self._disk = disk
        self._chunk = chunk
        self._carry_out_offloads = carry_out_offloads
        self._num_recomputed = self._num_different = 0

    def run(self, call_id: str, num_paths: int) -> CacheVerified:
        num_read, num_unreadable = self._disk.verify_payloads()
        for path in self._disk.sample_paths(num_paths):
            self._recompute(path)
        return CacheVerified(
            call_id=call_id,
            num_read=num_read,
            num_unreadable=num_unreadable,
            num_recomputed=self._num_recomputed,
            num_different=self._num_different,
        )

    def _recompute(self, path: list[int]) -> None:
        """`path`: disk slots from a first block on. Left out when the pool has no room for it now."""
        blocks = self._manager.borrow_blocks(len(path))
        if blocks is None:
            return
        try:
            self._carry_out_offloads()
            self._prefill([token for slot in path for token in unpack_tokens(self._disk.tokens(slot))], blocks)
            for slot, block_id in zip(path, blocks, strict=True):
                self._num_recomputed += 1
                payload = self._disk.payload(slot)
                self._num_different += payload is None or not self._runner.is_same_block(block_id, payload)
        finally:
            self._manager.return_blocks(blocks)

    def _prefill(self, token_ids: list[int], blocks: array[int]) -> None:
        for start in range(0, len(token_ids), self._chunk):
            sequence = ScheduledSequence(
                request_id="verify",
                token_ids=token_ids,
                num_computed=start,
                num_new=min(self._chunk, len(token_ids) - start),
                block_table=blocks,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                seed=0,
                num_prompt_tokens=len(token_ids),
                sample=False,
            )
            self._runner.execute(SchedulerOutput([sequence]))
