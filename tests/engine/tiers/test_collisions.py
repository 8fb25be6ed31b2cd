"""Two prompts of one block key, over every tier (CVE-2025-25183): each gets its own KV, or computes it.

xxh3 is no cryptographic hash: two blocks of one key can be crafted, and from there on all keys of two paths are the
same. Here that is a digest that sees no difference between some tokens. The fake device's "KV" is what was really in
the block, so a payload that is served to the other prompt changes the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.prefix_index import KEY_BYTES, PrefixIndex
from engine.protocol import EvictCache
from engine.scoped_tokens import SCOPE_BYTES, TOKEN_BYTES
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB, Harness
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_tiered_machine import BLOCKS, TieredMachine
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions, host_only

HEAD = [2, 4, 6, 8]
X, Y = [10, 12, 14, 16], [11, 12, 14, 16]  # of one key
Z = [30, 32, 34, 36]
END = [40, 42]


def blunt(data: bytes) -> bytes:
    """Of a parent's key, a scope and tokens; tokens 2n and 2n + 1 are the same to it."""
    kept = bytearray(data)
    first = KEY_BYTES + SCOPE_BYTES
    kept[first::TOKEN_BYTES] = bytes(byte & 0xFE for byte in data[first::TOKEN_BYTES])
    return xxhash.xxh3_128_digest(kept)


@pytest.fixture(autouse=True, scope="module")
def _blunt_keys(shared_store: StoreProcess) -> Iterator[None]:
    """In the tree, and where keys are made again after a restart."""
    CollidingTieredMachine.store = shared_store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.kv_cache_manager.PrefixIndex", partial(PrefixIndex, digest=blunt))
        patch.setattr("engine.tiers.index_loader.xxhash", SimpleNamespace(xxh3_128_digest=blunt))
        yield


def ask(harness: Harness, prompt: list[int]) -> int:
    """Compare with the text of no cache, and return how many tokens were cached."""
    name = harness.submit(prompt, 3)
    harness.run()
    assert harness.tokens_of(name) == expected_output(prompt, 3, VOCAB - 1)
    harness.check()
    return harness.accounts[name].num_cached_tokens


def evict(harness: Harness, tier: str) -> None:
    harness.engine.evict(EvictCache(call_id="", tier=tier, num_blocks=100))  # type: ignore[arg-type]
    while harness.engine.idle():
        pass


@pytest.fixture
def engine(tmp_path: Path, store: StoreProcess) -> Iterator[TieredEngine]:
    with TieredEngine(tmp_path, store.url, roomy()).loaded() as engine:
        yield engine


def roomy(incarnation: str = "one") -> TieredOptions:
    return TieredOptions(num_blocks=64, host_slots=64, disk_slots=64, incarnation=incarnation)


def test_what_follows_a_block_is_not_demoted_behind_another_of_its_key() -> None:
    harness = Harness(block_size=4, tiers=host_only(64))
    ask(harness, [*HEAD, *Y, *END])
    evict(harness, "device")
    ask(harness, [*HEAD, *X, *Z, *END])
    evict(harness, "device")
    assert ask(harness, [*HEAD, *Y, *Z, *END]) == 8
    evict(harness, "device")
    assert ask(harness, [*HEAD, *X, *Z, *END]) == 4


def test_of_two_paths_of_the_same_keys_the_first_is_kept_and_the_other_is_counted() -> None:
    harness = Harness(block_size=4, tiers=host_only(64))
    assert harness.engine.tiers is not None
    for prompt in ([*HEAD, *X, *Z, *END], [*HEAD, *Y, *Z, *END]):
        assert harness.engine.tiers.counters.num_dropped == 0
        ask(harness, prompt)
        evict(harness, "device")
    assert harness.engine.tiers.counters.num_dropped == 1
    assert ask(harness, [*HEAD, *X, *Z, *END]) == 13
    evict(harness, "device")
    assert ask(harness, [*HEAD, *Y, *Z, *END]) == 4


def test_a_block_is_not_written_through_out_of_the_host_slot_of_another(engine: TieredEngine) -> None:
    harness = engine.harness
    ask(harness, [*HEAD, *Y, *Z, *END])
    evict(harness, "device")
    evict(harness, "disk")
    for _ in range(4):
        ask(harness, [*HEAD, *X, *Z, *END])
    harness.engine.persist()
    engine.settle()
    assert engine.disk.counters.bytes_written
    evict(harness, "device")
    evict(harness, "host")
    assert ask(harness, [*HEAD, *X, *Z, *END]) == 13
    evict(harness, "device")
    assert ask(harness, [*HEAD, *Y, *Z, *END]) == 4


def test_what_is_read_from_the_disk_is_not_put_behind_another_block_in_host_memory(engine: TieredEngine) -> None:
    harness = engine.harness
    ask(harness, [*HEAD, *X, *Z, *END])
    evict(harness, "device")
    engine.settle()
    evict(harness, "host")
    ask(harness, [*HEAD, *Y, *END])
    evict(harness, "device")
    assert ask(harness, [*HEAD, *X, *Z, *END]) == 4  # its second block cannot come: computed
    evict(harness, "device")
    assert ask(harness, [*HEAD, *Y, *Z, *END]) == 8
    evict(harness, "device")
    evict(harness, "host")
    assert ask(harness, [*HEAD, *X, *Z, *END]) == 13
    assert harness.engine.stats().num_integrity_failures == 0


def test_a_stale_record_is_not_believed_behind_another_block_of_its_parents_key(
    tmp_path: Path, store: StoreProcess
) -> None:
    """Redis has lost its last writes: the slot of X has Y's record, that of Z still says that it stands behind it."""
    with TieredEngine(tmp_path, store.url, roomy()).loaded() as engine:
        name, size = f"radixgate:kv:{{{engine.slab.slab_id}}}:g:0", engine.store.format.size
        ask(engine.harness, [*X, *Z, *END])
        evict(engine.harness, "device")
        engine.settle()
        assert engine.disk.directory is not None
        first, second, *_ = engine.disk.sample_paths(1)[0]
        stale = redis.Redis.from_url(store.url).getrange(name, second * size, (second + 1) * size - 1)
        evict(engine.harness, "disk")
        evict(engine.harness, "host")
        ask(engine.harness, [*Y, 40])
        evict(engine.harness, "device")
        engine.settle()
        assert engine.disk.sample_paths(1) == [[first]]
        redis.Redis.from_url(store.url).setrange(name, second * size, stale)
    with TieredEngine(tmp_path, store.url, roomy("two")).loaded() as engine:
        assert ask(engine.harness, [*Y, *Z, *END]) == 4
        assert engine.disk.counters.num_damaged == 1
        assert ask(engine.harness, [*X, *Z, *END]) == 0


def test_nobody_waits_for_a_block_of_another_prompt() -> None:
    harness = Harness(block_size=4, chunk=4, token_budget=16)
    names = {harness.submit(prompt, 3): prompt for prompt in ([*X, *Z, *END], [*Y, *Z, *END])}
    harness.step()
    assert len(harness.engine.scheduler.running) == 2
    harness.run()
    for name, prompt in names.items():
        assert harness.tokens_of(name) == expected_output(prompt, 3, VOCAB - 1)


class CollidingTieredMachine(TieredMachine):
    """Everything at once."""

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6),
        scope=st.sampled_from([SCOPE_A, SCOPE_B]),
    )
    def come_and_go(self, prompts: list[list[int]], scope: bytes) -> None:
        """Prompts of few blocks, so that the same ones stand behind others of one key."""
        for blocks in prompts:
            prompt = [token for block in blocks for token in (block,) * 4]
            self.submit(0, prompt, 2, scope, public=0, use_cache=True, pinned=False)
            self.finish()
            self.harness.engine.evict(EvictCache(call_id="", tier="device", num_blocks=BLOCKS))


TestCollidingTieredMachine = CollidingTieredMachine.TestCase
TestCollidingTieredMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
