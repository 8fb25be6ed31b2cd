"""The gateway's metrics: bounded, documented, one truth over all workers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import PromptAccount
from gateway.metrics import GatewayMetrics, LabelTable
from gateway.model_use import ModelUse
from gateway.request_record import RequestRecord
from tests.gateway.conftest import RunningGateway
from tests.gateway.operated import METRICS_TOKEN, ask, run_operated, run_store

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
Samples = Mapping[tuple[str, ...], float]


def parse(text: bytes) -> Samples:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def families(text: bytes) -> set[str]:
    found = list(text_string_to_metric_families(text.decode()))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in found}
    return {name for name in names if not name.endswith("_created")}


def record(tenant: str = "alice", **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "time": 1.0,
        "request_id": "r",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "error_code": "",
        "tenant_id": tenant,
        "model": "m",
        "stream": False,
        "seconds": 1.0,
        "account": PromptAccount(device=60, cold=30, partial_block=10),
        "num_output_tokens": 7,
        "time_to_first_token": 0.2,
        "queue_seconds": 0.1,
        "seconds_saved": 0.5,
        "retrieval": None,
        "prepare_seconds": 0.01,
        "traceparent": "",
        "token_intervals": [0.01] * 6,
        "miss": None,
        "causes": (),
        "documents": (),
        **changes,
    }
    return RequestRecord(**values)  # type: ignore[arg-type]


@pytest.fixture
def operated(tmp_path: Path) -> Iterator[RunningGateway]:
    with run_operated(tmp_path, "") as running:
        yield running


def scrape(gateway: RunningGateway, path: str = "/metrics") -> bytes:
    answer = gateway.http.get(path, headers={"authorization": f"Bearer {METRICS_TOKEN}"})
    assert answer.status_code == 200
    return answer.content


def test_every_metric_is_documented_and_every_documented_one_exists(operated: RunningGateway) -> None:
    """A metric that nobody explains is read wrongly; one that is gone makes dashboards empty."""
    ask(operated, "hello")
    documented = set(re.findall(r"^\| `(radixgate_\w+)`", DOCS.read_text("utf-8"), re.MULTILINE))
    own = {name for name in documented if not name.startswith("radixgate_engine_")} | {"radixgate_engine_up"}
    assert families(scrape(operated)) == own


def test_metrics_need_their_token_and_no_tenants_key_opens_them(operated: RunningGateway) -> None:
    """They name every tenant: a tenant that reads them learns of the others."""
    for path in ("/metrics", "/metrics/engine"):
        assert operated.http.get(path).status_code == 401
        assert operated.http.get(path, headers=operated.headers("alice")).status_code == 401


def test_the_engines_metrics_are_passed_on_and_its_absence_is_said(tmp_path: Path) -> None:
    with run_operated(tmp_path, "") as gateway:
        assert b"radixgate_engine_steps_total 7" in scrape(gateway, "/metrics/engine")
        assert parse(scrape(gateway))["radixgate_engine_up",] == 1
        gateway.engine.reachable = False
        answer = gateway.http.get("/metrics/engine", headers={"authorization": f"Bearer {METRICS_TOKEN}"})
        assert answer.status_code == 503
        assert parse(scrape(gateway))["radixgate_engine_up",] == 0


def test_the_time_to_first_token_is_taken_at_the_first_token(
    operated: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """litellm#25598: taken at the answer's end, it is the whole time, and has none left for the tokens after it."""
    caplog.set_level("INFO", "gateway.access")
    ask(operated, "a question of some length, answered token by token", stream=False)
    operated.wait_until(lambda: any(r.name == "gateway.access" and "chat" in r.getMessage() for r in caplog.records))
    found = parse(scrape(operated))
    labels = ("miss", "echo/byte-model", "alice")
    tokens = found["radixgate_output_tokens_total", "echo/byte-model", "alice"]
    assert found["radixgate_time_to_first_token_seconds_count", *labels] == 1
    assert found["radixgate_inter_token_seconds_count", *labels] == tokens - 1
    first, rest = (found[f"radixgate_{name}_seconds_sum", *labels] for name in ("time_to_first_token", "inter_token"))
    fields = [vars(r)["fields"] for r in caplog.records if r.name == "gateway.access" and "chat" in r.getMessage()]
    assert min(first, rest) > 0
    assert first + rest <= fields[0]["seconds"]


def test_paths_and_methods_of_clients_make_no_new_series(operated: RunningGateway) -> None:
    """A label that a client chooses grows the series without end."""
    for i in range(20):
        operated.http.request(f"X{i}", f"/nowhere/{i}")
        operated.http.get(f"/v1/unknown-{i}")
    routes = {key for key in parse(scrape(operated)) if key[0] == "radixgate_http_requests_total"}
    assert len([key for key in routes if "other" in key or "/v1/…" in key]) <= 4


def test_a_refused_request_is_counted_by_its_outcome(operated: RunningGateway) -> None:
    request = {"model": "echo/byte-model", "messages": [{"role": "user", "content": "fail:engine_overloaded"}]}
    operated.http.post("/v1/chat/completions", json=request, headers=operated.headers())
    found = parse(scrape(operated))
    assert found["radixgate_requests_total", "echo/byte-model", "server_error", "alice"] == 1
    assert not any(key[0] == "radixgate_prompt_tokens_total" for key in found)


def test_tenants_beyond_the_bound_are_other_and_nothing_is_lost() -> None:
    """litellm#12159: a series for each user, until the monitoring system falls over."""
    metrics = GatewayMetrics(tenant_labels=3)
    for i in range(10):
        metrics.request_finished(record(f"tenant-{i}"))
    found = parse(metrics.text(engine_up=True, store_up=True))
    counts = {key[2]: count for key, count in found.items() if key[0] == "radixgate_output_tokens_total"}
    assert set(counts) == {"tenant-0", "tenant-1", "tenant-2", "other"}
    assert sum(counts.values()) == 70


def test_workers_agree_on_who_has_a_label(tmp_path: Path) -> None:
    """Each worker naming the tenants it saw first, one tenant would stand under its name and under `other` at once."""
    one, two = LabelTable(tmp_path / "tenants", 2), LabelTable(tmp_path / "tenants", 2)
    assert [one.label("a"), two.label("b"), one.label("c"), two.label("c")] == ["a", "b", "other", "other"]
    assert [one.label("b"), two.label("a")] == ["b", "a"]


def test_the_classes_of_a_prompt_sum_to_its_length() -> None:
    """I9."""
    metrics = GatewayMetrics()
    metrics.request_finished(record(account=PromptAccount(device=1, host=2, disk=3, cold=4, diverged=5, evicted=6)))
    found = parse(metrics.text(engine_up=True, store_up=True))
    assert sum(n for key, n in found.items() if key[0] == "radixgate_prompt_tokens_total") == 21


def test_a_rewritten_query_adds_its_tokens_and_says_nothing_of_the_answers_hits() -> None:
    """I9: also when it is all that the model did, for a search or for a request that failed behind it."""
    use = ModelUse(account=PromptAccount(device=20, cold=3), num_output_tokens=5, seconds_saved=0.25)
    metrics = GatewayMetrics()
    metrics.request_finished(record(rewriting=use))  # beside an answer: 60 of 100 cached, 7 tokens, 0.5 s
    alone = {"account": None, "num_output_tokens": 0, "seconds_saved": 0.0, "time_to_first_token": None}
    metrics.request_finished(record(rewriting=use, **alone))
    found = parse(metrics.text(engine_up=True, store_up=True))
    tokens = {key[1]: count for key, count in found.items() if key[0] == "radixgate_prompt_tokens_total"}
    assert tokens == {"device": 60 + 2 * 20, "cold": 30 + 2 * 3, "partial_block": 10}
    assert found["radixgate_output_tokens_total", "m", "alice"] == 7 + 2 * 5
    assert found["radixgate_prefill_saved_seconds_total", "m", "alice"] == 0.5 + 2 * 0.25
    times = {key[1]: n for key, n in found.items() if key[0] == "radixgate_time_to_first_token_seconds_count"}
    assert times == {"hit": 1}


def test_a_store_that_is_away_is_seen(tmp_path: Path) -> None:
    with run_store(tmp_path) as store, run_operated(tmp_path, store.url) as gateway:
        gateway.wait_until(lambda: parse(scrape(gateway))["radixgate_store_up",] == 1)
        assert store.child is not None
        store.child.kill()
        gateway.wait_until(lambda: parse(scrape(gateway))["radixgate_store_up",] == 0)
