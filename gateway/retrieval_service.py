"""All of retrieval that one gateway has, put together and started in one place.

Library ◄── Ingestor ◄── ParserProcess, Embedder          Redis
   ▲            │ ingested: PrefillAhead
   └── SearchIndexes ◄── Searcher ◄── /v1/vector_stores/…/search, chat
Popularity, Conversations, Erasure
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from engine.settings import RetrievalSettings
from gateway.engine_port import Engine
from gateway.erasure import Erasure
from gateway.prefill_ahead import PrefillAhead
from gateway.served_model import ServedModels
from gateway.tenants import Tenant
from retrieval.conversations import Conversations
from retrieval.embedder_client import Embedder
from retrieval.ingest import Ingestor, ModelTokenizer
from retrieval.library import Job, Library
from retrieval.parser_process import ParserProcess
from retrieval.pins import Pins
from retrieval.popularity import Popularity
from retrieval.records import Chunking, CollectionFile, document_id_of
from retrieval.redis_commands import RedisCommands
from retrieval.search_indexes import SearchIndexes
from retrieval.searcher import Searcher


class RetrievalService:
    def __init__(
        self,
        settings: RetrievalSettings,
        redis: Redis,
        embedder: Embedder,
        engine: Engine,
        models: ServedModels,
        may_store: Callable[[str], bool],
    ) -> None:
        """`may_store`: whether a tenant's KV may be kept."""
        self.settings = settings
        self.auto_chunking = Chunking(max_tokens=settings.chunk_tokens, overlap_tokens=settings.chunk_overlap_tokens)
        self.embedder = embedder
        self._redis = redis
        self._models = models
        self._engine = engine
        commands = RedisCommands(redis)
        self.library = Library(commands)
        self.indexes = SearchIndexes(self.library, commands, embedder)
        self.searcher = Searcher(self.library, self.indexes, embedder, settings.operator_tenant)
        self.popularity = Popularity(commands)
        self.conversations = Conversations(commands)
        self.pins = Pins(commands, self.library)
        self.erasure = Erasure(engine, commands)
        self.prefill = PrefillAhead(
            engine,
            models,
            self.library,
            self.popularity,
            self.pins,
            self._is_public,
            settings.prefill_tokens_per_minute,
            may_store,
            self._may_prefill,
        )
        parser = ParserProcess(timeout_seconds=settings.parse_seconds, memory_bytes=settings.parse_memory)
        self.ingestor = Ingestor(self.library, parser, embedder, self._tokenizer, self._ingested)

    async def start(self) -> None:
        """Starts what runs in the background. Neither Redis nor the embedder has to be there yet."""
        await self.embedder.start()
        for part in (self.indexes, self.popularity, self.erasure, self.prefill, self.ingestor):
            await part.start()

    async def close(self) -> None:
        for part in (self.ingestor, self.prefill, self.erasure, self.popularity, self.indexes):
            await part.close()
        await self.embedder.close()
        await self._redis.aclose()

    async def erase(self, tenant: Tenant, chunk_ids: Sequence[str]) -> int | None:
        """The KV of passages that this tenant has deleted; what others have of the operator's goes as well."""
        owner = None if self.is_operator(tenant.id) else tenant.owner or tenant.id
        return await self.erasure.erase(owner, [document_id_of(each) for each in chunk_ids])

    def is_operator(self, tenant_id: str) -> bool:
        """Whether collections of this tenant can be public."""
        return tenant_id == self.settings.operator_tenant

    async def _is_public(self, tenant_id: str, document_id: str) -> bool:
        if not self.is_operator(tenant_id):
            return False
        names = [(tenant_id, each.id) for each in await self.library.collections(tenant_id) if each.public]
        for name in names:
            await self.indexes.current(name)
        return self.indexes.find(names, document_id) is not None

    def _may_prefill(self) -> bool:
        """Not while the embedder needs the cores that the engine would take."""
        info = self._engine.info
        shares_cores = not self.settings.embedder_endpoint and info is not None and info.device == "cpu"
        return not (shares_cores and self.ingestor.is_working)

    def _ingested(self, job: Job, member: CollectionFile) -> None:
        self.prefill.offer(job.tenant, member.chunk_ids)

    async def _tokenizer(self) -> ModelTokenizer:
        model = await self._models.current()
        return ModelTokenizer(model.tokenizer_name, model.info.tokenizer_json, model.prompts.document_tokens)
