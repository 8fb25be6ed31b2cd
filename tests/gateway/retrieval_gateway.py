"""A gateway with retrieval over a real store, and what tests do with it through the unchanged SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import pytest
import redis
from openai.types.chat import ChatCompletion

from engine.settings import RetrievalSettings, ServerSettings, Settings, TenantSettings
from retrieval.redis_commands import connect_store
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.retrieval.hashing_embedder import HashingEmbedder

SETTINGS = Settings(
    server=ServerSettings(max_choices=4, max_body_bytes=1 << 20),
    retrieval=RetrievalSettings(
        chunk_tokens=400,  # bytes: the tests' tokenizer
        operator_tenant="dave",
        max_file_bytes=1 << 20,
        prefill_tokens_per_minute=0,
        parse_seconds=20,
    ),
)


@dataclass(slots=True)
class RetrievalGateway:
    gateway: RunningGateway
    embedder: HashingEmbedder

    @property
    def engine(self) -> FakeEngine:
        return self.gateway.engine

    def client(self, tenant: str = "alice") -> openai.OpenAI:
        return self.gateway.client(tenant)

    def store_with(self, client: openai.OpenAI, files: dict[str, str | bytes]) -> tuple[str, dict[str, str]]:
        """A vector store with these files, all ingested: its id, and the files' ids by their names."""
        store = client.vector_stores.create(name="docs")
        ids: dict[str, str] = {}
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            ids[name] = client.files.create(file=(name, data), purpose="assistants").id
        if ids:
            batch = client.vector_stores.file_batches.create_and_poll(store.id, file_ids=list(ids.values()))
            assert batch.file_counts.completed == len(ids), batch
        return store.id, ids

    def ask(self, client: openai.OpenAI, question: str, store_id: str, **retrieval: object) -> ChatCompletion:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": "You answer."}, {"role": "user", "content": question}],
            extra_body={"retrieval": {"vector_store_ids": [store_id], **retrieval}},
        )


@contextmanager
def running(
    store_url: str,
    settings: Settings = SETTINGS,
    *,
    engine: FakeEngine | None = None,
    embedder: HashingEmbedder | None = None,
    keys: dict[str, str] | None = None,
    tenants: list[TenantSettings] | None = None,
) -> Iterator[RetrievalGateway]:
    embedder = embedder or HashingEmbedder()
    # Tenants' keys are new with each gateway, their ids are not: nothing may be left of an earlier test.
    gateways = run_gateway_thread(
        engine or FakeEngine(),
        settings,
        redis=connect_store(store_url),
        embedder=embedder,
        store_url=store_url,
        keys=keys,
        tenants=tenants,
    )
    for gateway in gateways:
        yield RetrievalGateway(gateway, embedder)


def cached_tokens(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def retrieval_of(answer: ChatCompletion) -> dict[str, object]:
    found = (answer.model_extra or {}).get("retrieval")
    assert isinstance(found, dict), answer
    return found


@pytest.fixture
def retrieval(store_url: str) -> Iterator[RetrievalGateway]:
    flush(store_url)
    with running(store_url) as gateway:
        yield gateway


def flush(store_url: str) -> None:
    with redis.Redis.from_url(store_url) as client:
        client.flushall()
