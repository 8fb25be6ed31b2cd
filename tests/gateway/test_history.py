"""The history behind the dashboard's charts, over a real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.protocol import PromptAccount, Segment, SegmentKind
from gateway.history import MAX_DOCUMENTS, HistoryWriter, document_key, hour_key, minute_key
from gateway.history_reader import DEFAULT_SPAN, HistoryReader, Span, span_of, total
from gateway.model_use import ModelUse
from gateway.request_record import DocumentShare, MissPoint, in_prompt_order, locate
from gateway.store import EmbeddedStore
from gateway.store_client import StoreClient
from tests.gateway.conftest import RunningGateway
from tests.gateway.operated import ask, run_operated, run_store
from tests.gateway.test_metrics import record

pytestmark = pytest.mark.redis
NOW = 1_800_000_000.0


class Losses:
    def __init__(self) -> None:
        self.count = 0

    def history_dropped(self, count: int) -> None:
        self.count += count


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with run_store(tmp_path_factory.mktemp("history")) as running:
        yield running


@pytest.fixture
async def client(store: EmbeddedStore) -> AsyncIterator[StoreClient]:
    client = StoreClient(store.url)
    await client.fetch(("FLUSHALL",))
    yield client
    await client.close()


def miss(kind: SegmentKind = SegmentKind.DOCUMENT) -> MissPoint:
    return MissPoint(segment=kind, document_id="d1", token=60, token_in_segment=4)


async def test_what_was_written_is_read_by_tenant_and_for_everyone(client: StoreClient) -> None:
    writer = HistoryWriter(client, 35, Losses())
    for tenant, count in (("alice", 3), ("bob", 2)):
        for _ in range(count):
            writer.request_finished(record(tenant, time=NOW))
    await writer.flush()
    reader = HistoryReader(client)
    for who, count in (("alice", 3), ("bob", 2), (None, 5), ("carol", 0)):
        sums = total(await reader.series(who, DEFAULT_SPAN, NOW))
        assert (sums.requests, sums.prompt, sums.cached, sums.output) == (count, 100 * count, 60 * count, 7 * count)
        assert sums.hit_rate == (0.6 if count else None)


async def test_a_rewritten_query_is_in_the_sums(client: StoreClient) -> None:
    """I9: the charts show what the usage shows."""
    writer = HistoryWriter(client, 35, Losses())
    use = ModelUse(account=PromptAccount(device=20, cold=3), num_output_tokens=5)
    writer.request_finished(record(time=NOW, rewriting=use))
    writer.request_finished(record(time=NOW, rewriting=use, account=None, num_output_tokens=0))
    await writer.flush()
    sums = total(await HistoryReader(client).series("alice", DEFAULT_SPAN, NOW))
    assert (sums.requests, sums.prompt, sums.cached, sums.output) == (2, 100 + 46, 60 + 40, 7 + 10)


async def test_long_spans_are_read_by_the_hour_and_agree(client: StoreClient) -> None:
    writer = HistoryWriter(client, 35, Losses())
    for minutes in (0, 30, 300, 1000):
        writer.request_finished(record(time=NOW - 60 * minutes))
    await writer.flush()
    reader = HistoryReader(client)
    assert total(await reader.series("alice", span_of("6h"), NOW)).requests == 3
    points = await reader.series("alice", span_of("24h"), NOW)
    assert (len(points), total(points).requests) == (24, 4)


async def test_every_bucket_has_an_end(client: StoreClient) -> None:
    """A history without a TTL fills the store."""
    writer = HistoryWriter(client, 35, Losses())
    writer.request_finished(
        record(time=NOW, miss=miss(), documents=(DocumentShare(document_id="d", num_tokens=9, num_cached_tokens=3),))
    )
    await writer.flush()
    keys = (await client.fetch(("KEYS", "*")))[0]
    assert isinstance(keys, list)
    ttls = await client.fetch(*(("TTL", key) for key in keys))
    assert len(keys) >= 8
    assert all(isinstance(ttl, int) and ttl > 0 for ttl in ttls)


async def test_examples_say_where_a_prompt_diverged(client: StoreClient) -> None:
    writer = HistoryWriter(client, 35, Losses())
    account = PromptAccount(device=60, diverged=40)
    for i in range(30):
        writer.request_finished(record(time=NOW, request_id=f"r{i}", account=account, miss=miss()))
    await writer.flush()
    examples = (await HistoryReader(client).examples("alice", 5))["diverged"]
    assert len(examples) == 5
    assert {(row.document_id, row.token, row.token_in_segment) for row in examples} == {("d1", 60, 4)}
    assert (await HistoryReader(client).examples("bob", 5))["diverged"] == []


async def test_common_causes_are_counted_and_stand_beside_the_examples(client: StoreClient) -> None:
    writer = HistoryWriter(client, 35, Losses())
    for causes in (("timestamp_in_system_prompt", "evicted"), ("timestamp_in_system_prompt",), ()):
        writer.request_finished(record(time=NOW, miss=miss(), causes=causes))
    await writer.flush()
    reader = HistoryReader(client)
    causes = total(await reader.series("alice", DEFAULT_SPAN, NOW)).causes()
    assert causes == {"timestamp_in_system_prompt": 2, "evicted": 1}
    shown = [example.causes for example in (await reader.examples("alice", 5))["cold"]]
    assert sorted(shown) == [(), ("timestamp_in_system_prompt",), ("timestamp_in_system_prompt", "evicted")]


async def test_documents_are_bounded_and_ranked(client: StoreClient) -> None:
    """Document ids are the clients' to choose: a table of all of them would grow without end."""
    writer = HistoryWriter(client, 35, Losses())
    for i in range(MAX_DOCUMENTS + 200):
        shares = [DocumentShare(document_id=f"d{i}", num_tokens=10, num_cached_tokens=0)]
        shares.append(DocumentShare(document_id="popular", num_tokens=10, num_cached_tokens=5))
        writer.request_finished(record(time=NOW, documents=tuple(shares)))
    await writer.flush()
    top = (await HistoryReader(client).documents("alice", 3, NOW))[0]
    assert (top.document_id, top.num_requests, top.num_cached_tokens) == ("popular", 1200, 6000)
    size = (await client.fetch(("ZCARD", document_key(int(NOW) // 86_400, "alice", "n"))))[0]
    assert size == MAX_DOCUMENTS


async def test_the_store_away_keeps_the_sums_and_then_bounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is away for long must not fill the gateway's memory; what is lost is counted."""
    monkeypatch.setattr("gateway.history.MAX_CELLS", 100)
    losses = Losses()
    away = StoreClient(f"unix://{tmp_path}/nothing.sock")
    writer = HistoryWriter(away, 35, losses)
    for i in range(50):
        writer.request_finished(record(f"t{i}", time=NOW))
    await writer.flush()
    await away.close()
    assert 0 < losses.count < 50
    assert len(writer._sums) < 200


async def test_quantiles_lie_inside_their_bucket(client: StoreClient) -> None:
    writer = HistoryWriter(client, 35, Losses())
    for seconds in (0.06, 0.07, 0.08, 3.0):
        writer.request_finished(record(time=NOW, time_to_first_token=seconds))
    await writer.flush()
    sums = total(await HistoryReader(client).series("alice", DEFAULT_SPAN, NOW))
    assert sums.ttft_count("hit") == 4
    p50, p95 = sums.ttft_quantile("hit", 0.5), sums.ttft_quantile("hit", 0.95)
    assert p50 is not None
    assert p95 is not None
    assert 0.05 < p50 <= 0.1
    assert 1.6 < p95 <= 3.2
    assert sums.ttft_quantile("miss", 0.5) is None


async def test_a_thousand_tenants_cost_the_operators_page_no_more_keys(client: StoreClient) -> None:
    """The page of everyone reads its own sums, not those of each tenant."""
    writer = HistoryWriter(client, 35, Losses())
    for i in range(1000):
        writer.request_finished(record(f"tenant-{i:04}", time=NOW))
    await writer.flush()
    reader = HistoryReader(client)
    assert total(await reader.series(None, DEFAULT_SPAN, NOW)).requests == 1000
    first = await reader.tenants(Span("1h", 60), "", 1, 50, NOW)
    assert (first.num_rows, first.num_pages, len(first.rows)) == (1000, 20, 50)
    found = await reader.tenants(Span("24h", 1440), "-099", 1, 50, NOW)
    assert sorted(row.tenant_id for row in found.rows) == [f"tenant-099{i}" for i in range(10)]
    assert {(row.sums.requests, row.sums.prompt, row.sums.cached) for row in found.rows} == {(1, 100, 60)}
    keys = (await client.fetch(("EXISTS", minute_key(int(NOW) // 60, "*"), hour_key(int(NOW) // 3600, "*"))))[0]
    assert keys == 2


def test_a_miss_is_located_in_the_segment_where_the_cached_prefix_ends() -> None:
    scope = b"s" * 16
    segments = (
        Segment.of(SegmentKind.SYSTEM, range(20), scope),
        Segment.of(SegmentKind.DOCUMENT, range(30), scope, "d0"),
        Segment.of(SegmentKind.DOCUMENT, range(40), scope, "d1"),
        Segment.of(SegmentKind.QUESTION, range(10), scope),
    )
    swapped = in_prompt_order(segments, (1, 0))
    assert [segment.document_id for segment in swapped] == [None, "d1", "d0", None]
    where, shares = locate(swapped, PromptAccount(device=64, cold=30, partial_block=6))
    assert where == MissPoint(segment=SegmentKind.DOCUMENT, document_id="d0", token=64, token_in_segment=4)
    assert [(share.document_id, share.num_cached_tokens) for share in shares] == [("d1", 40), ("d0", 4)]
    assert locate(segments, PromptAccount(device=96, partial_block=4))[0] is None, (
        "nothing that a cache could have held"
    )


async def test_a_store_that_never_answers_makes_no_request_wait_and_reads_degraded(tmp_path: Path) -> None:
    """Redis down: every request waited for it, or was refused with a bogus 429."""
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_unix_server(lambda _, writer: connections.append(writer), tmp_path / "silent.sock")

    def drive() -> None:
        with run_operated(tmp_path, f"unix://{tmp_path}/silent.sock") as gateway:
            for i in range(5):
                ask(gateway, f"question {i}")
            ready = gateway.http.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "degraded")

    await asyncio.to_thread(drive)
    silent.close()
    for writer in connections:
        writer.close()


def test_the_gateways_own_requests_reach_the_store(store: EmbeddedStore, tmp_path: Path) -> None:
    with run_operated(tmp_path, store.url) as gateway:
        wait_for_history(gateway, store)


def wait_for_history(gateway: RunningGateway, store: EmbeddedStore) -> None:
    async def read() -> int:
        client = StoreClient(store.url)
        points = await HistoryReader(client).series("dave", DEFAULT_SPAN, time.time())
        await client.close()
        return total(points).requests

    ask(gateway, "hello", "dave")
    gateway.wait_until(lambda: asyncio.run(read()) == 1)
