"""I9 over a random run: what the clients were told, what usage says, what the metrics say, what the engine counted.

With streams, several choices, queries that are rewritten first, clients that leave, their retries, refusals, and a pool
so small that requests are preempted. litellm#36168, #11789: streams lost tokens; vllm#25780: recomputation was counted
as hits.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.cases.conftest import MODEL, Stack, retrieval_options, run_stack
from tests.gateway.operated import METRICS_TOKEN, operated_settings
from tests.gateway.test_metrics import parse

pytestmark = pytest.mark.redis

TENANTS = ("alice", "bob", "carol")  # carol's clients never leave: her account is exact to the last output token
QUESTION = "What does the third paragraph of the second document say about blocks? " * 4


class Job(NamedTuple):
    tenant: str
    body: dict[str, Any]
    path: str = "/v1/chat/completions"
    leaves: bool = False
    repeats: bool = False

    def headers(self, stack: Stack) -> dict[str, str]:
        return {**stack.gateway.headers(self.tenant), "x-stainless-retry-count": str(int(self.repeats))}


class Told(NamedTuple):
    tenant: str
    prompt: int
    cached: int
    output: int | None  # None: its client did not wait for that
    rewritten: bool  # its query


def jobs(dice: random.Random, count: int, stores: Mapping[str, str]) -> list[Job]:
    """`stores`: the vector store of each tenant."""
    made: list[Job] = []
    for i in range(count):
        tenant = dice.choice(TENANTS)
        content = f"{dice.randint(0, 5)} {QUESTION[: dice.randint(100, 280)]}"
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": dice.randint(20, 200),
        }
        if i % 3 == 1:
            search = {"vector_store_ids": [stores[tenant]], "max_num_results": 1, "rewrite_query": True}
            body = {**body, "max_tokens": 20, "retrieval": search}
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if tenant != "carol" and i % 5 == 0:
            made.append(Job(tenant, {**streamed, "max_tokens": 600, "seed": i}, leaves=True))
        elif i % 12 == 7:
            search = {"query": [content, QUESTION[:80]], "rewrite_query": True}
            made.append(Job(tenant, search, f"/v1/vector_stores/{stores[tenant]}/search"))
        elif dice.random() < 0.4:
            made.append(Job(tenant, streamed))
        else:
            made.append(Job(tenant, {**body, "n": dice.choice((1, 1, 2))}))
    return made


def perform(stack: Stack, job: Job) -> Told:
    http, headers = stack.gateway.http, job.headers(stack)
    if job.leaves:
        with http.stream("POST", job.path, json=job.body, headers=headers) as response:
            prompt, cached = (int(response.headers[f"x-radixgate-{name}-tokens"]) for name in ("prompt", "cached"))
            rewriting = rewriting_of(response.headers)
            next(response.iter_raw())
            return Told(job.tenant, prompt + rewriting["prompt"], cached + rewriting["cached"], None, bool(rewriting))
    response = http.post(job.path, json=job.body, headers=headers)
    assert response.status_code == 200, response.text
    body = response.text.strip().split("\n\n")[-2].removeprefix("data: ") if job.body.get("stream") else response.text
    usage = json.loads(body)["usage"]
    parts = [usage, usage["query_rewrite"]] if "query_rewrite" in usage else [usage]
    if rewriting := rewriting_of(response.headers):  # of a search, this is all that it used
        last = parts[-1]
        assert (rewriting["prompt"], rewriting["output"]) == (last["prompt_tokens"], last["completion_tokens"])
    return Told(
        job.tenant,
        sum(part["prompt_tokens"] for part in parts),
        sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts),
        sum(part["completion_tokens"] for part in parts),
        bool(rewriting),
    )


def rewriting_of(headers: httpx.Headers) -> Counter[str]:
    """What the rewriting of the query used; empty when none was rewritten."""
    told = headers.get("x-radixgate-query-rewrite", "")
    return Counter({name: int(count) for name, count in (part.split("=") for part in told.split(", ") if part)})


def perform_all(stack: Stack, todo: Sequence[Job]) -> list[Told]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: perform(stack, job), todo))


def usage_by_tenant(stack: Stack) -> dict[str, Counter[str]]:
    params = {"start_time": int(time.time()) - 600, "group_by": "project_id"}
    page = stack.gateway.http.get("/admin/v1/usage", params=params, headers=stack.gateway.headers("root")).json()
    found = {tenant: Counter[str]() for tenant in TENANTS}
    for bucket in page["data"]:
        for result in bucket["results"]:
            numbers = {name: value for name, value in result.items() if isinstance(value, int)}
            found[result["project_id"]].update(numbers)
            assert sum(result["input_tokens_by_class"].values()) == result["input_tokens"]
    return found


def metrics_by_tenant(stack: Stack) -> dict[str, Counter[str]]:
    headers = {"authorization": f"Bearer {METRICS_TOKEN}"}
    found = {tenant: Counter[str]() for tenant in TENANTS}
    for (name, *labels), value in parse(stack.gateway.http.get("/metrics", headers=headers).content).items():
        tenant = next((label for label in labels if label in found), None)
        if tenant is not None and name.endswith("_total"):
            found[tenant][name.removeprefix("radixgate_")] += int(value)
            if name == "radixgate_prompt_tokens_total" and {"device", "host", "disk"} & {*labels}:
                found[tenant]["cached"] += int(value)
            if name == "radixgate_requests_total":
                found[tenant][labels[1]] += int(value)  # model, outcome, tenant
    return found


def store_of(stack: Stack, tenant: str) -> str:
    """A vector store with one short text."""
    with stack.gateway.client(tenant) as client:
        file = client.files.create(file=("blocks.txt", QUESTION.encode()), purpose="assistants")
        store = client.vector_stores.create(name="texts")
        client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
    return store.id


def test_responses_usage_metrics_and_engine_agree(tmp_path: Path, empty_store_url: str) -> None:
    options = retrieval_options(empty_store_url, "dave")
    operated = operated_settings(tmp_path, empty_store_url)
    options["settings"] = msgspec.structs.replace(operated, retrieval=options["settings"].retrieval)
    for stack in run_stack(tmp_path, num_blocks=96, operated=True, **options):
        stores = {tenant: store_of(stack, tenant) for tenant in TENANTS}
        first = jobs(random.Random(11), 50, stores)
        left = [job for job in first if job.leaves]
        stack.runner.step_seconds = 0.002  # long enough for a client to be missed before its answer's end
        told = perform_all(stack, first)
        stack.gateway.wait_until(lambda: num_aborted(stack) == len(left))  # noqa: B023  used within this turn
        # Those that gave up ask again, beside others; and one asks what is refused.
        retries = [job._replace(leaves=False, repeats=True) for job in left]
        more = [job for job in jobs(random.Random(12), 10, stores) if not job.leaves]
        told += perform_all(stack, [*retries, *more])
        refused = {"model": MODEL, "messages": [], "max_tokens": 3}
        headers = stack.gateway.headers("bob")
        assert stack.gateway.http.post("/v1/chat/completions", json=refused, headers=headers).status_code == 400
        assert {each.output is None for each in told if each.rewritten} == {True, False}
        stats, usage, metrics = stack.wait_idle(), usage_by_tenant(stack), metrics_by_tenant(stack)
        assert stats.num_preemptions > 0
        assert stats.num_prompt_tokens == sum(each.prompt for each in told)
        assert sum(counts["num_retries"] for counts in usage.values()) == len(left) > 3
        for tenant in TENANTS:
            mine = [each for each in told if each.tenant == tenant]
            used, seen = usage[tenant], metrics[tenant]
            prompt, cached = sum(each.prompt for each in mine), sum(each.cached for each in mine)
            assert used["input_tokens"] == seen["prompt_tokens_total"] == prompt
            assert used["input_cached_tokens"] == seen["cached"] == cached
            assert used["output_tokens"] == seen["output_tokens_total"]
            assert used["num_model_requests"] + used["num_retries"] == len(mine) == seen["ok"] + seen["disconnected"]
            assert used["num_aborted"] == seen["disconnected"] == sum(each.output is None for each in mine)
            assert saved_seconds(stack, tenant) == pytest.approx(used_saved(stack, tenant), abs=1e-4)
            if tenant == "carol":
                assert used["output_tokens"] == sum(each.output or 0 for each in mine) > 0


def num_aborted(stack: Stack) -> int:
    return sum(counts["num_aborted"] for counts in usage_by_tenant(stack).values())


def used_saved(stack: Stack, tenant: str) -> float:
    params = {"start_time": int(time.time()) - 600}
    page = stack.gateway.http.get("/v1/usage", params=params, headers=stack.gateway.headers(tenant)).json()
    return sum(result["prefill_seconds_saved"] for bucket in page["data"] for result in bucket["results"])


def saved_seconds(stack: Stack, tenant: str) -> float:
    headers = {"authorization": f"Bearer {METRICS_TOKEN}"}
    samples = parse(stack.gateway.http.get("/metrics", headers=headers).content)
    return samples["radixgate_prefill_saved_seconds_total", MODEL, tenant]
