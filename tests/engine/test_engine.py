"""The engine over the fake device: I6, I7, I10 and recovery."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.batch import SchedulerOutput, StepResult, TokenLogprobs
from engine.engine import LLMEngine
from engine.errors import ContextLengthExceededError, InvalidRequestError, InvariantError, OverloadedError
from engine.kv_cache_manager import KVCacheManager
from engine.output_stream import OutputStream
from engine.protocol import Delta, SamplingParams, Segment, SegmentKind, Submit, TenantPolicy
from engine.request import Request
from engine.scheduler import Scheduler
from tests.engine.fake_runner import FakeStep, expected_output
from tests.engine.harness import EOS, SCOPE_A, SCOPE_B, VOCAB, Harness, word_tokenizer


@pytest.fixture(params=[False, True], ids=["in turn", "runs ahead"], autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test over both kinds of device: a step in flight changes neither texts nor counts."""
    monkeypatch.setattr(Harness, "runs_ahead", request.param)


def expect(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, count, VOCAB - 1)


def submit_of(prompt: list[int], name: str = "x", **sampling: object) -> Submit:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    segment = Segment.of(SegmentKind.QUESTION, prompt, SCOPE_A)
    return Submit(request_id=name, tenant_id="t", segments=(segment,), sampling=params)


@pytest.mark.parametrize("length", range(1, 14))
def test_i7_cold_warm_and_longer_prompts_give_the_text_of_no_cache_at_all(length: int) -> None:
    harness = Harness()
    prompt = list(range(length))
    for _ in range(2):
        assert harness.generate(prompt, 6) == expect(prompt, 6)
    longer = [*prompt, 77, 78]
    assert harness.generate(longer, 6) == expect(longer, 6)
    harness.check()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_i6_a_prompt_of_whole_blocks_that_is_fully_cached_computes_one_token(blocks: int) -> None:
    """nano-vllm#144, #211: zero query tokens and a crash."""
    harness = Harness(block_size=4)
    prompt = list(range(4 * blocks))
    harness.generate(prompt)
    before = harness.runner.num_computed_tokens
    name = harness.submit(prompt, max_tokens=1)
    harness.run()
    assert harness.runner.num_computed_tokens - before == 1
    assert harness.accounts[name].num_cached_tokens == len(prompt) - 1
    assert harness.tokens_of(name) == expect(prompt, 1)


def test_what_a_first_answer_wrote_is_cached_for_the_next_turn() -> None:
    harness = Harness()
    prompt = list(range(10))
    answer = harness.generate(prompt, 8)
    follow_up = [*prompt, *answer, 50, 51]
    name = harness.submit(follow_up)
    harness.run()
    assert harness.accounts[name].num_cached_tokens >= (len(prompt) + len(answer) - 1) // 4 * 4
    assert harness.tokens_of(name) == expect(follow_up, 4)


def test_i5_through_the_engine_the_same_prompt_of_another_tenant_is_cold() -> None:
    harness = Harness()
    prompt = list(range(30))
    names = [harness.submit(prompt, scope=scope, name=str(i)) for i, scope in enumerate([SCOPE_A, SCOPE_B])]
    harness.run()
    repeat = harness.submit(prompt, scope=SCOPE_A)
    harness.run()
    assert [harness.accounts[name].num_cached_tokens for name in names] == [0, 0]
    assert harness.accounts[names[1]].cold == harness.accounts[names[1]].num_prompt_tokens - 2
    assert harness.accounts[repeat].num_cached_tokens == 29


def test_a_public_system_prompt_is_shared_by_tenants() -> None:
    harness = Harness()
    system, mine, theirs = list(range(12)), [20, 21, 22, 23, 24], [30, 31]
    harness.generate([*system, *mine], scope=SCOPE_A, public=12)
    name = harness.submit([*system, *theirs], scope=SCOPE_B, public=12)
    harness.run()
    assert harness.accounts[name].num_cached_tokens == 12
    assert harness.tokens_of(name) == expect([*system, *theirs], 4)


def test_use_cache_false_neither_finds_nor_leaves_anything() -> None:
    harness = Harness()
    prompt = list(range(20))
    name = harness.submit(prompt, use_cache=False)
    harness.run()
    assert harness.manager.counts().cached == 0
    assert harness.accounts[name].disabled == 20
    harness.generate(prompt)
    again = harness.submit(prompt, use_cache=False)
    harness.run()
    assert harness.accounts[again].num_cached_tokens == 0


def test_a_health_probe_is_in_no_count_of_requests_and_tokens() -> None:
    """I9: with probes among them the metrics said more than all usage together."""
    harness = Harness()
    harness.submit([1, 2, 3], max_tokens=2)
    harness.run()
    before = harness.engine.stats()
    harness.submit([1, 2, 3], max_tokens=2, use_cache=False, counted=False)
    harness.run()
    aborted, failed = (harness.submit([4, 5], use_cache=False, counted=False) for _ in range(2))
    harness.engine.abort_request(aborted)
    harness.runner.fail_next = RuntimeError("device lost")
    harness.run()
    assert list(harness.failures) == [failed]
    after = harness.engine.stats()
    of_the_device = ("num_steps", "num_step_failures", "num_computed_tokens", "prefill_tokens_per_second")
    kept = {name: getattr(before, name) for name in of_the_device}
    assert msgspec.structs.replace(after, **kept) == before
    assert after.num_computed_tokens > before.num_computed_tokens


def test_the_account_sums_to_the_prompt_and_is_taken_once_under_preemption() -> None:
    """vllm#25780, sglang#11900: recomputation counted as hits, cached above prompt."""
    rng = random.Random(3)
    harness = Harness(num_blocks=12, block_size=4, token_budget=64, chunk=32)
    prompts = {harness.submit(p, max_tokens=12): p for p in ([rng.randrange(255) for _ in range(9)] for _ in range(6))}
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        account = harness.accounts[name]
        assert account.num_prompt_tokens == len(prompt)
        assert account.num_cached_tokens == 0
        assert harness.tokens_of(name) == expect(prompt, 12)
    assert harness.engine.stats().num_cached_tokens == 0


def test_an_evicted_prompt_is_computed_again_and_says_so() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    harness.generate(list(range(20)), 1)
    harness.generate(list(range(100, 130)), 1)
    name = harness.submit(list(range(20)), 2)
    harness.run()
    assert harness.accounts[name].evicted > 0
    assert harness.tokens_of(name) == expect(list(range(20)), 2)


def test_reuse_goes_to_the_last_token_of_a_document_across_its_seam() -> None:
    """LMCache#4667: a chunk's worth of reuse lost at every seam. Here 5 + 9 + 9 tokens end inside a block of 4."""
    harness = Harness()
    for name, order in (("first", [1, 2, 3]), ("other end", [1, 2, 4]), ("other middle", [1, 5, 3])):
        harness.engine.add_request(msgspec.structs.replace(documents_of(order, name), document_order="given"))
        harness.run()
        prompt = [7] * 5 + [20 * n + i for n in order for i in range(9)] + [200, 201]
        assert harness.tokens_of(name) == expect(prompt, 3)
    assert harness.accounts["other end"].num_cached_tokens == 5 + 9 + 9
    assert harness.accounts["other middle"].num_cached_tokens == 5 + 9
    harness.check()


def documents_of(order: list[int], name: str) -> Submit:
    texts = {
        number: Segment.of(SegmentKind.DOCUMENT, range(20 * number, 20 * number + 9), SCOPE_A, f"d{number}")
        for number in order
    }
    segments = (
        Segment.of(SegmentKind.SYSTEM, [7] * 5, SCOPE_A),
        *(texts[number] for number in order),
        Segment.of(SegmentKind.QUESTION, [200, 201], SCOPE_A),
    )
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    return Submit(request_id=name, tenant_id="t", segments=segments, sampling=sampling, document_order="cache")


def test_documents_in_another_order_are_found_when_the_order_is_ours() -> None:
    harness = Harness()
    harness.engine.add_request(documents_of([3, 1, 2], "first"))
    harness.engine.add_request(documents_of([2, 3, 1], "second"))
    harness.run()
    assert harness.accounts["second"].num_cached_tokens >= 5 + 27
    assert (harness.orders["first"], harness.orders["second"]) == ((1, 2, 0), (2, 0, 1))
    assert harness.tokens_of("first") == harness.tokens_of("second")
    prompt = [7] * 5 + [20 * n + i for n in (1, 2, 3) for i in range(9)] + [200, 201]
    assert harness.tokens_of("first") == expect(prompt, 3)


# ---------------------------------------------------------------------- the end of a request


def test_it_stops_at_an_end_token_unless_told_to_ignore_it() -> None:
    harness = Harness()
    harness.runner.vocab_size = VOCAB
    prompt = next(p for p in ([n] for n in range(5000)) if EOS in expected_output(p[:1], 6, VOCAB)[:6] and p[0] < 255)
    out = expected_output(prompt, 6, VOCAB)
    harness.engine.add_request(submit_of(prompt, "stops", max_tokens=6))
    harness.engine.add_request(submit_of(prompt, "ignores", max_tokens=6, ignore_eos=True))
    harness.run()
    assert harness.tokens_of("stops") == out[: out.index(EOS)]
    assert (harness.finished["stops"], harness.finished["ignores"]) == ("stop", "length")


def test_special_tokens_that_the_model_draws_are_not_shown() -> None:
    harness = Harness()
    out = expect([1, 2, 3], 4)
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens([f"w{out[1]} "])
    info = msgspec.structs.replace(harness.engine.info(), tokenizer_json=tokenizer.to_str().encode())
    harness.engine = LLMEngine(info, harness.engine.settings, harness.runner)
    assert harness.generate([1, 2, 3], 4) == [out[0], *out[2:]]


def test_a_stop_string_ends_the_text_before_it() -> None:
    harness = Harness()
    out = expect([1, 2, 3], 6)
    harness.engine.add_request(submit_of([1, 2, 3], max_tokens=6, stop=(f"w{out[3]} ",)))
    harness.run()
    assert (harness.tokens_of("x"), harness.finished["x"]) == (out[:3], "stop")


def test_it_ends_at_the_context_length() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    assert len(harness.generate(list(range(12)), 100)) == 4
    assert set(harness.finished.values()) == {"length"}


def test_a_prompt_that_is_too_long_names_both_numbers_and_leaves_nothing() -> None:
    """mini-sglang: dropped with a log line while its client waits."""
    harness = Harness(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthExceededError, match=r"16 tokens.*holds 16"):
        harness.submit(list(range(16)))
    assert not harness.engine.has_work()


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        Harness().submit([1, token])


def test_a_request_id_in_use_and_a_full_queue_are_refused() -> None:
    harness = Harness()
    harness.submit([1], name="same")
    with pytest.raises(InvalidRequestError, match="in use"):
        harness.submit([2], name="same")
    for _ in range(harness.engine.settings.max_waiting - 1):
        harness.submit([3], max_tokens=1)
    with pytest.raises(OverloadedError, match="1024"):
        harness.submit([3])
    harness.run()
    assert harness.tokens_of("same") == expect([1], 4)


# ---------------------------------------------------------------------- what can go wrong


def test_a_failing_step_ends_its_requests_and_the_next_ones_are_right() -> None:
    harness = Harness(max_num_seqs=2)
    prompt = list(range(20))
    harness.generate(prompt, 2)
    doomed = [harness.submit([*prompt, n], max_tokens=8) for n in (40, 41)]
    waiting = harness.submit([*prompt, 42], max_tokens=8)
    harness.step()
    harness.runner.fail_next = RuntimeError("device lost its mind")
    harness.run()
    assert {harness.failures[name].code for name in doomed} == {"engine_step_failed"}
    assert "mind" not in harness.failures[doomed[0]].message
    assert harness.tokens_of(waiting) == expect([*prompt, 42], 8)
    assert harness.engine.stats().num_step_failures == 1
    assert harness.engine.stats().num_active_blocks == 0
    harness.check()


def test_a_row_without_finite_logits_ends_alone() -> None:
    harness = Harness()
    names = [harness.submit([n], max_tokens=5) for n in (1, 2, 3)]
    harness.step()
    harness.runner.lose_rows = frozenset({1})
    harness.run()
    assert list(harness.failures) == [names[1]]
    for name, token in ((names[0], 1), (names[2], 3)):
        assert harness.tokens_of(name) == expect([token], 5)
    harness.check()


def test_drift_is_noticed_counted_and_repaired_and_requests_go_on() -> None:
    """sglang#35270: accounting off by a page ended a healthy idle server."""
    harness = Harness()
    name = harness.submit(list(range(9)), max_tokens=10)
    harness.step()
    harness.step()
    harness.manager.pool.allocate(1)
    assert not harness.engine.check_integrity()
    harness.run()
    assert harness.tokens_of(name) == expect(list(range(9)), 10)
    assert harness.engine.check_integrity()
    stats = harness.engine.stats()
    assert (stats.num_integrity_failures, stats.num_free_blocks + stats.num_cached_blocks) == (1, stats.num_blocks)


@pytest.mark.parametrize("call", range(1, 8))
def test_an_invariant_that_breaks_in_a_step_loses_no_text(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    calls = iter(range(1, 1000))
    original = KVCacheManager.cache_blocks

    def break_once(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
        if next(calls) == call:
            raise InvariantError("I2: just this once")
        original(manager, request, num_tokens)

    monkeypatch.setattr(KVCacheManager, "cache_blocks", break_once)
    names = [harness.submit([n, n + 1], max_tokens=8) for n in (1, 20, 40)]
    harness.run()
    assert harness.engine.stats().num_integrity_failures == 1
    for name, token in zip(names, (1, 20, 40), strict=True):
        assert harness.tokens_of(name) == expect([token, token + 1], 8)


def test_an_exception_of_any_kind_in_the_bookkeeping_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    calls = iter(range(100))
    original = Scheduler.schedule

    def break_once(scheduler: Scheduler) -> SchedulerOutput:
        if next(calls) == 2:
            raise KeyError("a bug")
        return original(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", break_once)
    name = harness.submit([1, 2, 3], max_tokens=6)
    harness.run()
    assert harness.tokens_of(name) == expect([1, 2, 3], 6)
    assert harness.engine.stats().num_integrity_failures == 1


def test_output_that_cannot_be_made_into_text_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    names = [harness.submit([n, 5], max_tokens=6) for n in (1, 2)]
    original = OutputStream.push

    def break_one(stream: OutputStream, token_id: int, logprobs: TokenLogprobs | None) -> Delta | None:
        if stream._request.request_id == names[0]:
            raise UnicodeError("no text")
        return original(stream, token_id, logprobs)

    monkeypatch.setattr(OutputStream, "push", break_one)
    harness.run()
    assert harness.failures[names[0]].code == "engine_step_failed"
    assert harness.tokens_of(names[1]) == expect([2, 5], 6)
    assert harness.engine.stats().num_integrity_failures == 0
    harness.check()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"policy": TenantPolicy(weight=0.0)}, "policy.weight"),
        ({"policy": TenantPolicy(weight=float("nan"))}, "policy.weight"),
        ({"policy": TenantPolicy(weight=5e-324)}, "policy.weight"),
        ({"policy": TenantPolicy(weight=float("inf"))}, "policy.weight"),
        ({"policy": TenantPolicy(max_running=0)}, "policy.max_running"),
        ({"policy": TenantPolicy(kv_floor_tokens=-1)}, "policy.kv_floor_tokens"),
        ({"policy": TenantPolicy(kv_quota_tokens=-1)}, "policy.kv_quota_tokens"),
        ({"sampling": SamplingParams(max_tokens=1, stop=("",))}, "stop"),
        ({"sampling": SamplingParams(max_tokens=1, stop=("x",) * 65)}, "stop"),
        ({"sampling": SamplingParams(max_tokens=1, stop=("x" * 4097,))}, "stop"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": SamplingParams(max_tokens=1, num_logprobs=21)}, "num_logprobs"),
        ({"sampling": SamplingParams(max_tokens=1, num_logprobs=-1)}, "num_logprobs"),
        ({"sampling": SamplingParams(max_tokens=1, min_tokens=-1)}, "min_tokens"),
        *(
            ({"sampling": SamplingParams(max_tokens=1, **{name: value})}, name)
            for name, values in {
                "temperature": (float("nan"), float("inf"), -0.1),
                "top_p": (float("nan"), 0.0, -1.0, 2.0),
                "top_k": (-1,),
                "min_p": (float("nan"), -0.1, 1.5),
                "seed": (2**64, -(2**64)),
                "frequency_penalty": (float("nan"), float("inf")),
                "presence_penalty": (float("nan"), -1e9),
                "repetition_penalty": (float("nan"), 0.0, -1.0, float("inf")),
                "logit_bias": ({0: float("nan")}, {0: float("inf")}),
            }.items()
            for value in values
        ),
        ({"pin_top": -1, "document_order": "cache"}, "pin_top"),
        ({"sampling": SamplingParams(max_tokens=1, logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(max_tokens=1, logit_bias={-1: 1.0})}, "logit_bias"),
        ({"segments": ()}, "messages"),
        ({"segments": (Segment(SegmentKind.QUESTION, b"\1\0\0\0", b"short"),)}, "segments"),
        ({"segments": (Segment(SegmentKind.QUESTION, b"\1\0\0", SCOPE_A),)}, "segments"),
    ],
)
def test_an_impossible_request_is_refused_and_leaves_nothing(change: dict[str, object], param: str) -> None:
    """A gateway that sends nonsense must not be able to end the engine."""
    harness = Harness()
    with pytest.raises(InvalidRequestError) as caught:
        harness.engine.add_request(msgspec.structs.replace(submit_of([1, 2]), **change))
    assert caught.value.param == param
    assert not harness.engine.has_work()
    assert harness.generate([1, 2]) == expect([1, 2], 4)


def test_an_abort_that_finds_the_bookkeeping_broken_still_ends_the_request() -> None:
    harness = Harness()
    names = [harness.submit([n, n + 1], max_tokens=8) for n in (1, 20)]
    harness.step()
    victim = next(r for r in harness.engine.scheduler.running if r.request_id == names[1])
    harness.manager.pool.release(victim.block_table)
    assert harness.engine.abort_request(names[1])
    harness.run()
    assert harness.engine.stats().num_integrity_failures == 1
    assert harness.tokens_of(names[0]) == expect([1, 2], 8)
    assert harness.engine.check_integrity()


def test_an_invariant_that_keeps_breaking_ends_the_request_instead_of_looping(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()

    def broken(*args: object) -> None:
        raise InvariantError("I1: always")

    monkeypatch.setattr("engine.kv_cache_manager.KVCacheManager.cache_blocks", broken)
    name = harness.submit([1, 2, 3])
    harness.run(max_steps=10)
    assert harness.failures[name].code == "engine_step_failed"
    monkeypatch.undo()
    assert harness.generate([1, 2, 3]) == expect([1, 2, 3], 4)


@pytest.mark.parametrize("steps", range(12))
def test_i10_an_abort_in_any_phase_gives_everything_back(steps: int) -> None:
    """LMCache#3688, sglang#36475: a disconnect leaked blocks or corrupted the next request."""
    harness = Harness(num_blocks=16, block_size=4, token_budget=16, chunk=8)
    keep = list(range(60, 70))
    harness.submit(keep, max_tokens=6, name="keep")
    harness.submit(list(range(30)), max_tokens=20, name="gone")
    harness.submit(list(range(30)), max_tokens=3, name="follower")
    for _ in range(steps):
        harness.step()
    harness.engine.abort_request("gone")
    harness.check()
    harness.run()
    assert harness.tokens_of("keep") == expect(keep, 6)
    assert harness.tokens_of("follower") == expect(list(range(30)), 3)
    assert harness.manager.counts().active == 0
    assert not harness.engine.abort_request("gone")
    harness.check()


# ---------------------------------------------------------------------- a step in flight


def test_the_next_step_is_launched_before_the_one_before_is_waited_for() -> None:
    """And only one: what comes out of a step is acted upon one step later, not two."""
    harness = Harness(runs_ahead=True)
    events: list[str] = []
    launch = harness.runner.launch

    def noted(output: SchedulerOutput) -> FakeStep:
        number = len(harness.runner.outputs) + 1
        events.append(f"launch {number}")
        step = launch(output)
        wait = step.wait

        def noted_wait() -> StepResult:
            events.append(f"wait {number}")
            return wait()

        step.wait = noted_wait
        return step

    harness.runner.launch = noted
    assert harness.generate([1, 2, 3], 4) == expect([1, 2, 3], 4)
    assert events == [
        *("launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "launch 4", "wait 3", "wait 4")
    ]  # and no fifth: that the fourth token is the last is known before it is


def test_one_step_too_many_leaves_no_token_no_block_and_no_count() -> None:
    """An end that only the token tells of: it is seen when the next step is under way."""
    harness = Harness(runs_ahead=True)
    harness.runner.vocab_size = VOCAB
    prompt = next(p for p in ([n] for n in range(5000)) if EOS in expected_output(p[:1], 6, VOCAB)[1:5] and p[0] < 255)
    out = expected_output(prompt, 6, VOCAB)
    count = out.index(EOS) + 1
    harness.engine.add_request(submit_of(prompt, "stops", max_tokens=6))
    while "stops" not in harness.finished:
        harness.step()
    assert harness.engine.has_work()  # the step too many
    assert harness.manager.counts().active == 0
    harness.run()
    stats = harness.engine.stats()
    assert harness.tokens_of("stops") == out[: count - 1]
    assert (stats.num_output_tokens, stats.num_computed_tokens) == (count, len(prompt) + count)
    assert harness.runner.num_computed_tokens == len(prompt) + count
    harness.check()


def test_async_scheduling_can_be_turned_off() -> None:
    harness = Harness(runs_ahead=True)
    settings = msgspec.structs.replace(harness.engine.settings, async_scheduling=False)
    harness.engine = LLMEngine(harness.engine.info(), settings, harness.runner)
    harness.submit([1, 2, 3], 2)
    assert harness.step() != []


def test_a_request_that_is_preempted_while_its_step_runs_keeps_that_token() -> None:
    """Its blocks are gone, its token is good: thrown away, it would only be drawn again."""
    harness = Harness(num_blocks=8, block_size=4, token_budget=64, chunk=32, max_num_seqs=4, runs_ahead=True)
    prompts = {harness.submit(p, max_tokens=14): p for p in ([n, n + 1, n + 2, n + 3, n + 4, n + 5] for n in (0, 50))}
    while not harness.engine.stats().num_preemptions:
        harness.step()
        harness.check()
    victim = harness.engine.scheduler.waiting[0]
    known = victim.num_output_tokens
    assert len(harness.tokens_of(victim.request_id)) == known
    assert (
        sum(s.request_id == victim.request_id for o in harness.runner.outputs for s in o.sequences if s.sample) == known
    )
    harness.run()
    for name, prompt in prompts.items():
        assert harness.tokens_of(name) == expect(prompt, 14)
    harness.check()
