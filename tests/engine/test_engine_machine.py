"""A state machine of all that can happen to the engine, over a device that runs in turn and one that runs ahead."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB, Harness


class EngineMachine(RuleBasedStateMachine):
    """Submissions, aborts, failing steps and steps in any order, in a pool that is too small, with freed blocks
    poisoned: every finished text is that of no cache at all, and every count comes back."""

    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            num_blocks=14, block_size=4, token_budget=24, chunk=8, max_num_seqs=4, runs_ahead=self.runs_ahead
        )
        self.prompts: dict[str, tuple[list[int], int, int | None]] = {}

    @rule(
        head=st.sampled_from([0, 5, 8, 17]),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 16),
        scope=st.sampled_from([SCOPE_A, SCOPE_B]),
        public=st.sampled_from([0, 6]),
        use_cache=st.booleans(),
        siblings=st.sampled_from([0, 0, 1, 2]),
        when_idle=st.booleans(),
    )
    def submit(
        self,
        head: int,
        tail: list[int],
        max_tokens: int,
        scope: bytes,
        public: int,
        use_cache: bool,
        siblings: int,
        when_idle: bool,
    ) -> None:
        prompt, leader = [*range(100, 100 + head), *tail], ""
        for sibling in range(1 + siblings):
            seed = sibling if siblings else None
            name = self.harness.submit(
                prompt,
                max_tokens - sibling % max_tokens,
                scope,
                public=min(public, len(prompt) - 1),
                use_cache=use_cache or tail[0] > 0,
                sibling_of=leader,
                seed=seed,
                when_idle=when_idle and tail[0] > 1,
            )
            self.prompts[name] = (prompt, max_tokens - sibling % max_tokens, seed)
            leader = leader or name

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

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

    @rule()
    def lose_a_row(self) -> None:
        self.harness.runner.lose_rows = frozenset({0})
        self.harness.step()
        self.harness.runner.lose_rows = frozenset()

    @invariant()
    def i1_to_i4(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        self.harness.run()
        for name, (prompt, max_tokens, seed) in self.prompts.items():
            if name in self.harness.failures:
                assert self.harness.failures[name].code == "engine_step_failed"
                continue
            count = min(max_tokens, 14 * 4 - len(prompt))
            assert self.harness.tokens_of(name) == expected_output(prompt, count, VOCAB - 1, seed)
            account = self.harness.accounts[name]
            assert account.num_prompt_tokens == len(prompt)
            assert account.num_cached_tokens < len(prompt)
        assert self.harness.manager.counts().active == 0
        self.harness.check()


class AheadMachine(EngineMachine):
    """The same over a device that runs ahead."""

    runs_ahead = True


TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
