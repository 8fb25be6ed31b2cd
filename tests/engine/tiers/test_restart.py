"""The cache survives the process: what comes back is found, is right, and is a miss when it is not."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from engine.protocol import PromptAccount, SamplingParams, Segment, SegmentKind, Submit
from engine.tiers.disk_slab import PAGE
from engine.tiers.index_record import GROUP_SLOTS
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions

pytestmark = pytest.mark.redis

PROMPT = list(range(41))


def expect(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, count, VOCAB - 1)


def big(incarnation: str = "one", max_pending: int = 65_536) -> TieredOptions:
    return TieredOptions(num_blocks=64, host_slots=64, disk_slots=128, incarnation=incarnation, max_pending=max_pending)


def ask(engine: TieredEngine, prompt: list[int], scope: bytes = SCOPE_A) -> int:
    """Ask, compare with the text of no cache, and return how many tokens were cached."""
    name = engine.harness.submit(prompt, 3, scope)
    engine.harness.run()
    assert engine.harness.tokens_of(name) == expect(prompt, 3)
    engine.harness.check()
    return engine.harness.accounts[name].num_cached_tokens


def test_after_a_kill_the_first_repeat_comes_from_the_disk(tmp_path: Path, store: StoreProcess) -> None:
    """LMCache#1095, #1175: no hits after a restart, or "restored" and then everything recomputed."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    for _ in range(4):
        ask(first, PROMPT)
    first.settle()
    first.die()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        name = second.harness.submit(PROMPT, 3)
        second.harness.run()
        account = second.harness.accounts[name]
        assert account.disk == 40
        assert account.num_prompt_tokens == len(PROMPT)
        assert second.harness.tokens_of(name) == expect(PROMPT, 3)
        assert second.disk.counters.bytes_read > 0
        assert second.disk.counters.num_read_errors == 0
        second.harness.check()


def test_what_was_asked_only_once_is_written_when_the_engine_rests(tmp_path: Path, store: StoreProcess) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.persist()
    first.settle()
    assert first.disk.counters.bytes_written > 0
    first.die()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40


def test_a_disk_smaller_than_the_device_keeps_what_was_used_last_and_comes_to_rest(
    tmp_path: Path, store: StoreProcess
) -> None:
    """A resting engine wrote for ever: each path that was put on disk pushed another one out."""
    options = TieredOptions(num_blocks=64, host_slots=16, disk_slots=16)
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        prompts = [[n, *range(100, 130)] for n in range(5)]
        for prompt in [*prompts, prompts[0]]:
            ask(engine, prompt)
        engine.harness.engine.persist()
        engine.settle()
        assert engine.disk.counters.bytes_written <= 5 * 8 * engine.slab.block_bytes
    options.incarnation = "two"
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        assert ask(engine, prompts[0]) == 30
        assert ask(engine, prompts[1]) == 0


def test_a_clean_stop_writes_everything(tmp_path: Path, store: StoreProcess) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40


@pytest.mark.parametrize("is_cached_before", [False, True])
def test_a_pinned_document_is_on_disk_as_soon_as_it_was_computed(
    tmp_path: Path, store: StoreProcess, is_cached_before: bool
) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    if is_cached_before:
        ask(first, PROMPT)
    first.harness.submit(PROMPT, 1, document="handbook", pinned=True)
    first.harness.run()
    first.settle()
    first.die()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40


def test_a_prompt_that_parts_inside_a_block_on_disk_shares_its_first_tokens(
    tmp_path: Path, store: StoreProcess
) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        other = [*PROMPT[:18], 70, 71, 72, 73]
        name = second.harness.submit(other, 3)
        second.harness.run()
        account = second.harness.accounts[name]
        assert (account.device, account.host, account.disk) == (0, 0, 18)
        assert account.num_prompt_tokens == len(other)
        assert second.harness.tokens_of(name) == expect(other, 3)
        second.harness.check()
        assert ask(second, PROMPT) == 40


def test_i5_after_a_restart_too_a_tenant_finds_only_its_own(tmp_path: Path, store: StoreProcess) -> None:
    """sglang#26747, #38577: tenant B read every page of tenant A from the disk. Paired with A's own hit."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT, SCOPE_B) == 0
        assert ask(second, PROMPT, SCOPE_A) == 40


def test_preloading_fills_no_more_than_half_of_the_host_tier(tmp_path: Path, store: StoreProcess) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    for n in range(5):
        ask(first, [n, *range(40)])
    first.harness.engine.close()
    options = big("two")
    options.preload, options.host_slots = True, 24
    with TieredEngine(tmp_path, store.url, options).loaded() as second:
        second.settle()
        assert 0 < len(second.tiers.host) <= 12 + 10  # a path is read whole
        second.tiers.check_integrity()


def test_a_request_waits_for_the_disk_beside_others_that_compute(tmp_path: Path, store: StoreProcess) -> None:
    """Promotion overlaps with the prefill of the rest, and a follower waits for the same reads."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        names = [second.harness.submit(PROMPT, 3), second.harness.submit(PROMPT, 3)]
        other = second.harness.submit(list(range(100, 130)), 3)
        second.harness.run()
        for name in names:
            assert second.harness.tokens_of(name) == expect(PROMPT, 3)
        assert second.harness.tokens_of(other) == expect(list(range(100, 130)), 3)
        assert second.harness.accounts[names[0]].disk == 40
        assert second.disk.counters.bytes_read == 10 * second.slab.block_bytes


@pytest.mark.parametrize("harm", ["flush", "meta", "names", "groups"])
def test_a_store_that_lost_something_gives_misses_only(tmp_path: Path, store: StoreProcess, harm: str) -> None:
    """LMCache#426: Redis evicted a value but kept the metadata."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with store.client() as client:
        if harm == "flush":
            client.flushall()
        else:
            marks = {"meta": b":meta", "names": b":names", "groups": b":g:0"}
            gone = [key for key in store.key_names() if key.endswith(marks[harm])]
            assert gone
            client.delete(*gone)
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 0
        second.harness.engine.persist()
        second.settle()
    with TieredEngine(tmp_path, store.url, big("three")).loaded() as third:
        assert ask(third, PROMPT) == 40


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_part_of_the_index_that_is_lost_costs_what_hangs_below_it_and_nothing_else(
    tmp_path: Path, store: StoreProcess, lost: int
) -> None:
    """What `maxmemory` takes is one key and not all: records whose parents stood in it lead nowhere."""
    options = big()
    options.disk_slots = 3 * GROUP_SLOTS
    prompts = [[number % 250, number // 250, *range(6), *range(number % 60, number % 60 + 32)] for number in range(120)]
    first = TieredEngine(tmp_path, store.url, options).loaded()
    longer = [[*prompt, *range(60, 72)] for prompt in prompts[:10]]  # begin in one part and go on in another
    for number, prompt in enumerate(prompts + longer):
        ask(first, prompt)
        if number % 6 == 5:  # before the device has to let go of them
            first.harness.engine.persist()
            first.settle()
    first.harness.engine.close()
    (gone,) = (key for key in store.key_names() if key.endswith(f":g:{lost}".encode()))
    with store.client() as client:
        client.delete(gone)
    options.incarnation = "two"
    with TieredEngine(tmp_path, store.url, options).loaded() as second:
        cached = [ask(second, prompt) for prompt in longer + prompts[10:]]
        assert cached.count(0) >= 10, "what was lost"
        assert sum(tokens >= 36 for tokens in cached) >= 60, "what was not"
        if lost == 2:
            assert set(cached[:10]) == {40}, "of the longer ones what stood in the first part"
        second.settle()


def test_damaged_records_are_dropped_with_all_that_hangs_below_them(tmp_path: Path, store: StoreProcess) -> None:
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    size = first.store.format.size
    group = next(key for key in store.key_names() if key.endswith(b":g:0"))
    with store.client() as client:
        client.setrange(group.decode(), 5 * size + 70, b"\xff\xff")
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 20
        assert second.disk.counters.num_rejected == 5
        second.settle()


def test_a_restored_block_that_cannot_be_used_is_an_error_and_a_miss(tmp_path: Path, store: StoreProcess) -> None:
    """llama.cpp#26676: "restored", and then everything was computed again, without a word."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    with open(first.slab.path, "r+b") as file:
        file.seek(PAGE + 3 * PAGE + 5)  # small blocks take a page each
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert second.disk.counters.num_restored == 10
        assert ask(second, PROMPT) == 12
        assert (second.disk.counters.num_read_errors, second.disk.counters.num_damaged) == (1, 1)
        second.harness.engine.persist()
        second.settle()
    with TieredEngine(tmp_path, store.url, big("three")).loaded() as third:
        assert ask(third, PROMPT) == 40
        assert third.disk.counters.num_read_errors == 0


def test_another_fingerprint_on_the_same_store_finds_nothing(tmp_path: Path, store: StoreProcess) -> None:
    """sglang#24758, lmdeploy#4930, vllm#30931: KV of another model, dtype or adapter was read under the same name."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    other = TieredOptions(num_blocks=64, host_slots=64, disk_slots=128, fingerprint="ab" * 16)
    with TieredEngine(tmp_path, store.url, other).loaded() as second:
        assert ask(second, PROMPT) == 0
        second.harness.engine.persist()
        second.settle()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as third:
        assert ask(third, PROMPT) == 40


def test_an_engine_on_another_host_does_not_follow_this_ones_entries(tmp_path: Path, store: StoreProcess) -> None:
    """llm-d-router#2853: a restarted engine's entries were still followed. Here: another file, so another id."""
    first = TieredEngine(tmp_path / "here", store.url, big()).loaded()
    ask(first, PROMPT)
    first.settle()
    with TieredEngine(tmp_path / "there", store.url, big("two")).loaded() as second:
        assert second.disk.counters.num_restored == 0
        assert ask(second, PROMPT) == 0
    first.harness.engine.close()


def test_an_engine_that_was_replaced_no_longer_writes_the_index(tmp_path: Path, store: StoreProcess) -> None:
    """llm-d-kv-cache#232: a race orphaned a live entry. The scripts compare the incarnation."""
    engine = TieredEngine(tmp_path, store.url, big("old")).loaded()
    assert engine.store.claim("new", wipe=False)
    ask(engine, PROMPT)
    engine.harness.engine.persist()
    engine.wait_until(lambda: engine.disk.journal_stats().state.value == "stale")
    with store.client() as client:
        assert not [key for key in client.scan_iter() if b":g:" in key]
    engine.die()


def ask_documents(engine: TieredEngine, numbers: list[int], name: str) -> PromptAccount:
    """Five-block documents behind a system prompt, in an order that the engine chooses."""
    texts = [Segment.of(SegmentKind.DOCUMENT, range(20 * n, 20 * n + 20), SCOPE_A, f"d{n}") for n in numbers]
    head = Segment.of(SegmentKind.SYSTEM, [7] * 8, SCOPE_A)
    segments = (head, *texts, Segment.of(SegmentKind.QUESTION, [200, 201], SCOPE_A))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine.harness.engine.add_request(
        Submit(request_id=name, tenant_id="t", segments=segments, sampling=sampling, document_order="cache")
    )
    engine.harness.run()
    return engine.harness.accounts[name]


def test_after_a_restart_documents_stand_as_they_stood_before(tmp_path: Path, store: StoreProcess) -> None:
    """Who is popular is forgotten, and the device is empty: the order is the one that lies on the disk."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    for number in range(3):
        ask_documents(first, [3], f"popular {number}")
    ask_documents(first, [1, 2, 3], "all")
    assert first.harness.orders["all"] == (2, 0, 1)
    first.harness.engine.close()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        account = ask_documents(second, [2, 1, 3], "again")
        assert second.harness.orders["again"] == (2, 1, 0)
        assert account.disk == 8 + 3 * 20
        second.harness.check()


def test_random_traffic_over_many_lives_is_always_right(tmp_path: Path, store: StoreProcess) -> None:
    """A small device over a small host over a small disk, so that everything is evicted everywhere."""
    rng = random.Random(5)
    prompts = [[n % 3, *rng.choices(range(4), k=rng.randrange(3, 30))] for n in range(40)]
    restored = hits = 0
    for life in range(6):
        options = TieredOptions(
            num_blocks=14, host_slots=12, disk_slots=40, write_through_hits=1, incarnation=str(life), policy="gdsf"
        )
        engine = TieredEngine(tmp_path, store.url, options).loaded()
        restored += engine.disk.counters.num_restored
        for _ in range(25):
            names = {engine.harness.submit(prompt, 3): prompt for prompt in rng.sample(prompts, 3)}
            engine.harness.run()
            for name, prompt in names.items():
                assert engine.harness.tokens_of(name) == expect(prompt, 3)
                hits += engine.harness.accounts[name].disk
            engine.harness.check()
        assert engine.disk.counters.num_read_errors == 0
        if life % 2:
            engine.settle()
            engine.die()
        else:
            engine.harness.engine.close()
    assert restored > 0
    assert hits > 0
