"""Faults between tenants that were reported of other servers, through the whole stack over the fake device.

Each test of isolation has its positive half: what B must not get, A does get, or the test would pass without a cache.
"""

from __future__ import annotations

import inspect
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import InvalidRequestError
from engine.prefix_index import PrefixIndex
from engine.protocol import EngineStats, Segment, TierStats
from engine.scoped_tokens import ScopedTokens
from engine.settings import TenantSettings
from engine.tiers.directory import BlockIdentity, TierDirectory
from gateway.auth import hash_api_key
from tests.cases.conftest import BLOCK_SIZE, MODEL, Stack, run_stack
from tests.engine.tiers.tiered_harness import TieredOptions, TiersWithDisk
from tests.gateway.admin_client import AdminClient
from tests.gateway.conftest import SECRET, new_keys

QUESTION = "What does the third paragraph of the second document say about blocks? " * 4
SYSTEM = "You answer from the handbook, shortly, and name the page that you have it from. " * 3
DOCUMENT = {"id": "memo", "text": "The harbour opens at seven and closes at nine in the evening. " * 4}


def ask(stack: Stack, tenant: str = "alice", content: str = QUESTION, **options: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **options}
    response = stack.gateway.http.post("/v1/chat/completions", json=body, headers=stack.gateway.headers(tenant))
    assert response.status_code == 200, response.text
    return response


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def stored(tmp_path: Path, empty_store_url: str) -> Iterator[Stack]:
    yield from run_stack(tmp_path, store_url=empty_store_url)


def tenants_of(keys: dict[str, str], **options: dict[str, object]) -> list[TenantSettings]:
    return [
        TenantSettings(id=name, key_hashes=(hash_api_key(SECRET, keys[name]),), **options.get(name, {}))  # type: ignore[arg-type]
        for name in ("alice", "bob", "carol")
    ]


# ---------------------------------------------------------------- nobody sees anybody else


def test_b_reads_nothing_of_a(stack: Stack) -> None:
    """sglang#26747, #38577; ktransformers#2184: B's hits are 0, and A's are not, over HTTP, end to end."""
    ask(stack, "alice")
    assert cached(ask(stack, "bob")) == 0
    assert cached(ask(stack, "alice")) > 0


def test_b_reads_nothing_of_a_from_the_tier_below_either(tmp_path: Path) -> None:
    """sglang#26747: the lower tier's key had only tokens. Over HTTP; by the header that says from where tokens came."""
    for stack in run_stack(tmp_path, num_blocks=64, host_blocks=256):
        ask(stack, "alice")
        for i in range(4):  # alice's blocks leave the device
            ask(stack, "bob", f"{i} {QUESTION}")
        assert places(ask(stack, "bob"))["host"] == cached(ask(stack, "carol")) == 0
        for i in range(4):
            ask(stack, "bob", f"{i} {QUESTION}")
        assert places(ask(stack, "alice"))["host"] > 0


@pytest.mark.redis
def test_b_reads_nothing_of_a_from_the_disk_either(tmp_path: Path, empty_store_url: str) -> None:
    """sglang#26747 on disk, over HTTP: after a restart, what alice has asked lies there and nowhere else."""
    keys = new_keys()
    for stack in one_life(tmp_path, empty_store_url, "one", keys):
        ask(stack, "alice")
        ask(stack, "alice", cache_salt="victim")
        stack.wait_idle()
    for stack in one_life(tmp_path, empty_store_url, "two", keys):
        before = stack.wait_idle()
        assert (before.num_cached_blocks, blocks_of(before)["host"]) == (0, 0)
        assert blocks_of(before)["disk"] > 0
        for thief in ("bob", "carol"):
            for narrowing in ({}, {"cache_salt": "victim"}):
                answer = ask(stack, thief, **narrowing)
                assert cached(answer) == sum(places(answer)[tier] for tier in ("device", "host", "disk")) == 0
        assert tier_of(stack.wait_idle(), "disk").bytes_read == 0
        # The positive half: their owner has them from the disk, all of the prompt's full blocks.
        for narrowing in ({}, {"cache_salt": "victim"}):
            answer = ask(stack, "alice", **narrowing)
            prompt = answer.json()["usage"]["prompt_tokens"]
            assert places(answer)["disk"] > 0
            assert cached(answer) == prompt // BLOCK_SIZE * BLOCK_SIZE
        assert tier_of(stack.wait_idle(), "disk").bytes_read > 0


def one_life(data_dir: Path, store_url: str, incarnation: str, keys: dict[str, str]) -> Iterator[Stack]:
    """Of an engine with all tiers, up to its clean stop; it is asked when it knows what an earlier one left."""
    options = TieredOptions(block_size=BLOCK_SIZE, host_slots=64, disk_slots=256, incarnation=incarnation)
    below = TiersWithDisk(data_dir, store_url, options)
    for stack in run_stack(data_dir, tiers=below.tiers, keys=keys):
        stack.gateway.wait_until(lambda: below.disk.directory is not None)
        yield stack


def tier_of(stats: EngineStats, name: str) -> TierStats:
    return next(tier for tier in stats.tiers if tier.name == name)


def blocks_of(stats: EngineStats) -> dict[str, int]:
    return {tier.name: tier.num_blocks for tier in stats.tiers}


def places(response: httpx.Response) -> dict[str, int]:
    pairs = (pair.split("=") for pair in response.headers["x-radixgate-cache"].split(", "))
    return {name: int(count) for name, count in pairs}


def test_the_victims_salt_opens_nothing(stack: Stack) -> None:
    """vllm#53347: the salt was the caller's, so that an attacker sends the victim's."""
    for field in ("cache_salt", "prompt_cache_key", "user"):
        ask(stack, "alice", **{field: "victim"})
        assert cached(ask(stack, "bob", **{field: "victim"})) == 0
        assert cached(ask(stack, "alice", **{field: "victim"})) > 0


def test_no_call_of_the_cache_works_without_a_scope() -> None:
    """sglang#37160, LMCache#4825: a salt that was optional was dropped at a connector. Here there is no default."""
    for function in (Segment, Segment.of, BlockIdentity, ScopedTokens.of):
        assert inspect.signature(function).parameters["scope"].default is inspect.Parameter.empty
    for cls in (PrefixIndex, TierDirectory):
        functions = [each for name, each in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
        signatures = [inspect.signature(function).parameters for function in functions]
        for named in signatures:
            if {"token_ids", "tokens"} & named.keys():
                assert named["scope"].default is inspect.Parameter.empty, "tokens without their scope"
        scoped = [each for named in signatures for each in named.values() if each.annotation == "ScopedTokens"]
        assert scoped
        assert all(each.default is inspect.Parameter.empty for each in scoped)
    with pytest.raises(InvalidRequestError):
        ScopedTokens.of([1, 2, 3], b"", 4)


def visible(response: httpx.Response) -> tuple[object, ...]:
    """Everything that a client can see, but for random ids and clocks."""
    body = {name: value for name, value in response.json().items() if name not in ("id", "created")}
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}
    return json.dumps(body, sort_keys=True), sorted(headers.items())


def bobs_view(stack: Stack) -> list[tuple[object, ...]]:
    system = {"role": "system", "content": SYSTEM}
    user = {"role": "user", "content": QUESTION}
    asked: list[dict[str, Any]] = [
        {},
        {},
        {"documents": [DOCUMENT]},
        {"messages": [system, user], "documents": [DOCUMENT]},
        {"content": QUESTION + "More."},
    ]
    return [visible(ask(stack, "bob", cache_report=True, **options)) for options in asked]


def test_no_field_and_no_header_of_b_changes_because_of_a(stack: Stack, tmp_path: Path) -> None:
    """litellm#29955: a cache that two teams shared. Every visible byte of B's answers, with A's traffic and without."""
    for content in (QUESTION, QUESTION + "More."):
        for options in ({}, {"documents": [DOCUMENT]}, {"user": "u"}):
            ask(stack, "alice", content, **options)
            ask(stack, "carol", content, **options)
    after_others = bobs_view(stack)
    (tmp_path / "fresh").mkdir()
    for fresh in run_stack(tmp_path / "fresh", keys=stack.gateway.keys):
        alone = bobs_view(fresh)
        assert after_others == alone
        # The positive half: B's own traffic does change what B sees.
        assert bobs_view(fresh) != alone


def test_a_published_prompt_is_computed_once_and_says_nothing_of_what_follows(stored: Stack) -> None:
    """Tenants share the operator's prompt; why a miss behind it is a miss must not tell that others went on there."""
    root = AdminClient(stored.gateway)
    root.ok("PUT", "prompts/handbook", {"text": SYSTEM})
    options: dict[str, Any] = {"system_prompt_id": "handbook", "documents": [DOCUMENT], "cache_report": True}
    first = ask(stored, "alice", **options)
    assert cached(first) == 0
    second = ask(stored, "bob", **options)
    shared = cached(second)
    assert len(SYSTEM) // BLOCK_SIZE * BLOCK_SIZE <= shared <= len(SYSTEM) + 60
    own = cached(ask(stored, "alice", **options))
    assert own > shared + len(DOCUMENT["text"]) // 2
    third = ask(stored, "carol", messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}])
    assert cached(third) > 0  # by exact text, too
    # Whether bob has gone on behind it or nobody has: the reason is the same.
    missed = [s["classes"] for s in second.json()["cache_report"]["segments"] if s["document_id"] == "memo"]
    assert all("diverged" not in classes for classes in missed)
    owners = {use["owner"]: use["num_blocks"] for use in root.ok("GET", "cache")["owners"]}
    assert owners["public"] == shared // BLOCK_SIZE
    assert root.ok("DELETE", "prompts/handbook") is None
    assert stored.gateway.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "x"}], "system_prompt_id": "handbook"},
        headers=stored.gateway.headers(),
    ).status_code == 400  # fmt: skip


def test_a_tenant_that_opted_out_leaves_nothing(tmp_path: Path) -> None:
    """sglang#38069: it still left entries and evicted others."""
    keys = new_keys()
    tenants = tenants_of(keys, bob={"no_store": True})
    for stack in run_stack(tmp_path, keys=keys, tenants=tenants):
        assert [cached(ask(stack, "bob")) for _ in range(2)] == [0, 0]
        assert [cached(ask(stack, "bob", use_cache=True)) for _ in range(2)] == [0, 0]
        assert stack.wait_idle().num_cached_blocks == 0
        ask(stack, "alice")
        kept = stack.wait_idle().num_cached_blocks
        assert kept > 0
        ask(stack, "bob")
        assert stack.wait_idle().num_cached_blocks == kept


def test_a_tenant_that_opted_out_leaves_nothing_below_either(tmp_path: Path) -> None:
    keys = new_keys()
    tenants = tenants_of(keys, bob={"no_store": True})
    for stack in run_stack(tmp_path, keys=keys, tenants=tenants, num_blocks=64, host_blocks=64):
        for i in range(6):  # more than the device holds
            ask(stack, "bob", f"{i} {QUESTION}")
        assert [tier.num_blocks for tier in stack.wait_idle().tiers] == [0]
        for i in range(6):
            ask(stack, "alice", f"{i} {QUESTION}")
        assert [tier.num_blocks > 0 for tier in stack.wait_idle().tiers] == [True]


# ---------------------------------------------------------------- nobody takes anybody else's


@pytest.mark.parametrize("floor", [0, 640])
def test_a_flood_takes_a_quiet_tenants_prompts_only_without_a_floor(tmp_path: Path, floor: int) -> None:
    """mlx-serve#378: a batch sweep evicted the live chat: 0.5 s became 44 s."""
    keys = new_keys()
    tenants = tenants_of(keys, alice={"kv_floor_tokens": floor})
    for stack in run_stack(tmp_path, keys=keys, tenants=tenants, num_blocks=96):
        ask(stack, "alice")
        for i in range(12):
            ask(stack, "bob", f"{i} {QUESTION}")
        assert (cached(ask(stack, "alice")) > 0) == (floor > 0)
        ledger = {(line.owner, line.pressed_by) for line in stack.wait_idle().ledger}
        assert ("bob", "bob") in ledger
        assert (("alice", "bob") in ledger) == (floor == 0)


def test_over_its_quota_a_tenant_loses_its_own_oldest_and_is_never_refused(tmp_path: Path) -> None:
    """Mooncake#3741: a tenant over quota lost writes silently, or was refused thousands of times."""
    keys = new_keys()
    quota = 480
    for stack in run_stack(tmp_path, keys=keys, tenants=tenants_of(keys, bob={"kv_quota_tokens": quota})):
        ask(stack, "alice")
        prompts = [f"{i} {QUESTION}" for i in range(6)]
        for prompt in prompts:
            ask(stack, "bob", prompt)
        stats = stack.wait_idle()
        blocks = {use.owner: use.num_blocks for use in stats.owners}
        assert blocks["bob"] <= quota // BLOCK_SIZE
        assert {(line.owner, line.pressed_by) for line in stats.ledger} == {("bob", "bob")}
        assert cached(ask(stack, "bob", prompts[-1])) > 0
        assert cached(ask(stack, "alice")) > 0


# ---------------------------------------------------------------- one account


def test_usage_is_what_the_engine_did_over_a_random_run_with_preemption_and_aborts(
    tmp_path: Path, empty_store_url: str
) -> None:
    """I9: usage, responses and the engine's own counts agree. vllm#25780: recomputation was counted as hits."""
    chance = random.Random(3)
    for stack in run_stack(tmp_path, store_url=empty_store_url, num_blocks=64):
        prompts = [f"{i} {QUESTION[: chance.randint(100, 280)]}" for i in range(6)]
        bodies = [chance.choice(prompts) for _ in range(30)]

        def one(content: str) -> Any:
            return ask(stack, "alice", content, max_tokens=200).json()["usage"]  # noqa: B023  used within this turn

        with ThreadPoolExecutor(8) as pool:
            usages = list(pool.map(one, bodies))
        prompt = sum(usage["prompt_tokens"] for usage in usages)
        hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        output = sum(usage["completion_tokens"] for usage in usages)
        stats = stack.wait_idle()
        assert stats.num_preemptions > 0
        assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (prompt, hits, output)
        page = usage_page(stack)
        names = ("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
        assert [total(page, name) for name in names] == [prompt, hits, output, 30]
        stack.runner.step_seconds = 0.02  # none of these may reach its end before its client is missed
        for _ in range(5):
            with stack.gateway.http.stream(
                "POST",
                "/v1/chat/completions",
                json={
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "x"}],
                    "stream": True,
                    "max_tokens": 900,
                },
                headers=stack.gateway.headers(),
            ) as response:
                prompt += int(response.headers["x-radixgate-prompt-tokens"])
                next(response.iter_raw())
        stack.gateway.wait_until(lambda: total(usage_page(stack), "num_aborted") == 5)  # noqa: B023
        stats, page = stack.wait_idle(), usage_page(stack)
        assert total(page, "input_tokens") == stats.num_prompt_tokens == prompt
        assert total(page, "num_model_requests") == 35


def usage_page(stack: Stack) -> Any:
    params = {"start_time": int(time.time()) - 600}
    return stack.gateway.http.get("/v1/usage", params=params, headers=stack.gateway.headers()).json()


def total(page: Any, name: str) -> int:
    return sum(result[name] for bucket in page["data"] for result in bucket["results"])


def test_every_computed_token_has_a_reason(stack: Stack) -> None:
    """vllm#54607: zero hits look the same whatever the cause."""
    expected: list[tuple[str, dict[str, Any]]] = [
        ("cold", {}),
        ("diverged", {"content": QUESTION[:200] + "another way " * 12}),
        ("disabled", {"use_cache": False}),
    ]
    for reason, options in expected:
        report = ask(stack, cache_report=True, **options).json()["cache_report"]
        classes = {name for segment in report["segments"] for name in segment["classes"]}
        assert reason in classes
        assert sum(sum(s["classes"].values()) for s in report["segments"]) == report["prompt_tokens"]


def test_what_another_tenants_flood_has_evicted_has_that_for_a_reason(tmp_path: Path) -> None:
    for stack in run_stack(tmp_path, num_blocks=96):
        ask(stack, "alice")
        assert cached(ask(stack, "alice")) > 0
        for i in range(40):
            ask(stack, "bob", QUESTION, cache_salt=f"salt {i}")
        report = ask(stack, "alice", cache_report=True).json()["cache_report"]
        classes = [segment["classes"] for segment in report["segments"]]
        assert sum(each.get("evicted", 0) for each in classes) > 0
        assert sum(sum(each.values()) for each in classes) == report["prompt_tokens"]
