"""Everything at once over three small tiers: whatever is asked, aborted, failed, erased, killed or damaged, the text is
that of no cache, and I1, I3, I4, I5, I8 hold after every action."""

from __future__ import annotations

import os
import tempfile
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.protocol import Erase, EvictCache, TenantPolicy
from engine.tiers.disk_slab import PAGE
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions

BLOCKS = 14
BLOCK_SIZE = 4


@pytest.fixture(autouse=True, scope="module")
def _machine_store(shared_store: StoreProcess) -> None:
    TieredMachine.store = shared_store


class TieredMachine(RuleBasedStateMachine):
    store: StoreProcess
    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.lives = 0
        self.prompts: dict[str, tuple[list[int], int, bytes]] = {}
        self.entries: dict[str, tuple[list[int], bytes, int]] = {}  # of this life, in `asked`
        self.publics: dict[str, int] = {}  # tokens of each that everybody may read
        self.asked: list[tuple[list[int], bytes, int]] = []  # of all lives: tokens with their output, scope, public
        self.erased: set[bytes] = set()  # scopes that have been erased and not asked since
        self.live()

    def live(self) -> None:
        self.lives += 1
        options = TieredOptions(
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            host_slots=10,
            disk_slots=24,
            write_through_hits=1,
            token_budget=24,
            chunk=8,
            max_num_seqs=4,
            incarnation=str(self.lives),
            runs_ahead=self.runs_ahead,
        )
        self.engine = TieredEngine(Path(self.directory.name), self.store.url, options).loaded()
        self.harness = self.engine.harness

    @rule(
        head=st.sampled_from([0, 5, 8, 17]),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        scope=st.sampled_from([SCOPE_A, SCOPE_B]),
        public=st.sampled_from([0, 6]),
        use_cache=st.booleans(),
        pinned=st.booleans(),
        floor_and_quota=st.sampled_from([(0, None), (8, None), (24, None), (0, 0), (0, 4), (8, 12), (24, 24)]),
    )
    def submit(
        self,
        head: int,
        tail: list[int],
        max_tokens: int,
        scope: bytes,
        public: int,
        use_cache: bool,
        pinned: bool,
        floor_and_quota: tuple[int, int | None] = (0, None),
    ) -> None:
        prompt = [*range(100, 100 + head), *tail]
        name = self.harness.submit(
            prompt,
            max_tokens,
            scope,
            public=min(public, len(prompt) - 1),
            use_cache=use_cache or tail[0] > 0,
            document=f"d{head}",
            pinned=pinned,
            tenant=scope.decode(),
            policy=TenantPolicy(kv_floor_tokens=floor_and_quota[0], kv_quota_tokens=floor_and_quota[1]),
        )
        self.prompts[name] = (prompt, max_tokens, scope)
        self.publics[name] = min(public, len(prompt) - 1)
        if use_cache or tail[0] > 0:
            text = expected_output(prompt, max_tokens, VOCAB - 1)
            self.entries[name] = ([*prompt, *text], scope, self.publics[name])
            self.asked.append(self.entries[name])
        self.erased.discard(scope)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule()
    def finish(self) -> None:
        self.harness.run()

    @rule()
    def rest(self) -> None:
        self.harness.run()
        self.harness.engine.persist()
        self.engine.settle()
        assert not self.harness.manager.index.order.over_quota()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        if name not in self.harness.finished:
            self.harness.engine.abort_request(name)
            del self.prompts[name]

    @rule()
    def fail_a_step(self) -> None:
        self.harness.runner.fail_next = RuntimeError("now and then")
        self.harness.step()
        self.harness.runner.fail_next = None

    @rule(tier=st.sampled_from(["host", "disk"]), count=st.integers(1, 5))
    def evict(self, tier: str, count: int) -> None:
        self.harness.engine.evict(EvictCache(call_id="", tier=tier, num_blocks=count))  # type: ignore[arg-type]

    @rule(scope=st.sampled_from([SCOPE_A, SCOPE_B]))
    def erase_tenant(self, scope: bytes) -> None:
        self.harness.engine.erase(Erase(erase_id="", owner=scope.decode()))
        if not self.harness.engine.has_work():
            self.erased.add(scope)

    @rule(head=st.sampled_from([0, 5, 8, 17]))
    def erase_document(self, head: int) -> None:
        self.harness.engine.erase(Erase(erase_id="", document_ids=(f"d{head}",)))

    @rule()
    def flush_the_store(self) -> None:
        self.store.flush()

    @rule(position=st.floats(0, 1))
    def flip_a_bit_on_disk(self, position: float) -> None:
        path = self.engine.slab.path
        size = path.stat().st_size - PAGE
        if size > 0:
            with open(path, "r+b") as file:
                file.seek(PAGE + int(position * (size - 1)))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x40]))

    @rule()
    def kill_and_restart(self) -> None:
        self._check_texts()
        self.engine.die()
        self.prompts.clear()
        self.entries.clear()
        self.live()

    @invariant()
    def integrity(self) -> None:
        self.harness.check()

    @invariant()
    def an_erased_tenant_has_nothing_left(self) -> None:
        for scope in self.erased:
            owner = scope.decode()
            assert owner not in self.engine.tiers.host.owner_blocks
            assert self.engine.disk.directory is not None
            assert owner not in self.engine.disk.directory.owner_blocks

    def _check_texts(self) -> None:
        self.harness.run()
        for name, (prompt, max_tokens, _) in self.prompts.items():
            if name in self.harness.failures:
                assert self.harness.failures[name].code == "engine_step_failed"
                continue
            count = min(max_tokens, BLOCKS * BLOCK_SIZE - len(prompt))
            assert self.harness.tokens_of(name) == expected_output(prompt, count, VOCAB - 1)
            account = self.harness.accounts[name]
            assert account.num_prompt_tokens == len(prompt)
            assert account.num_cached_tokens < len(prompt)
            assert account.num_cached_tokens <= self._most_readable(name), "I5"
        assert self.harness.manager.counts().active == 0
        self.harness.check()

    def _most_readable(self, name: str) -> int:
        """Tokens that a request can have found at most: what it shares with another of its scope, in whatever life and
        tier, or what is public in both."""
        prompt, _, scope = self.prompts[name]
        most = 0
        for tokens, other_scope, public in (entry for entry in self.asked if entry is not self.entries.get(name)):
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, tokens, strict=False)))
            # A block that begins public and ends private is private: the tenant's own, whatever it begins with.
            if other_scope != scope or public // BLOCK_SIZE != self.publics[name] // BLOCK_SIZE:
                common = min(common, public, self.publics[name])
            most = max(most, common)
        return most

    def teardown(self) -> None:
        self._check_texts()
        self.engine.settle()
        counts = self.engine.tiers.host.counts()
        assert (counts.filling, counts.gone, counts.private) == (0, 0, 0)
        self.engine.die()
        self.directory.cleanup()


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class AheadTieredMachine(TieredMachine):
    """The same over a device that runs ahead: copies, too, are as late as they can be."""

    runs_ahead = True


TestAheadTieredMachine = AheadTieredMachine.TestCase
TestAheadTieredMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
