"""A real store for the whole session, and the parts of retrieval put together over it with an embedder of words."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pytest_asyncio
from redis.asyncio import Redis

from engine.protocol import pack_tokens
from retrieval.embedder_client import Embedder
from retrieval.ingest import Ingestor, ModelTokenizer
from retrieval.library import Attachment, Library
from retrieval.parser_process import ParserProcess
from retrieval.records import Attributes, Chunking, CollectionFile
from retrieval.redis_commands import RedisCommands
from retrieval.search_indexes import SearchIndexes
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.retrieval.hashing_embedder import HashingEmbedder
from tests.store_server import store_url

__all__ = ["store_url"]

CHUNKING = Chunking(max_tokens=400, overlap_tokens=0)  # the tests' tokenizer: a token is a byte


E = TypeVar("E", bound=Embedder)


@dataclass(slots=True)
class RetrievalParts(Generic[E]):
    """Retrieval as one gateway has it."""

    redis: Redis
    commands: RedisCommands
    library: Library
    ingestor: Ingestor
    indexes: SearchIndexes
    embedder: E
    tenant: str

    async def add(
        self,
        collection_id: str,
        name: str,
        text: str | bytes,
        attributes: Attributes | None = None,
        replaces: str | None = None,
        chunking: Chunking = CHUNKING,
    ) -> str:
        """Uploads, attaches and ingests. The file's id."""
        file_id = await self.attach_only(collection_id, name, text, attributes, replaces, chunking)
        await self.ingest_all()
        return file_id

    async def attach_only(
        self,
        collection_id: str,
        name: str,
        text: str | bytes,
        attributes: Attributes | None = None,
        replaces: str | None = None,
        chunking: Chunking = CHUNKING,
    ) -> str:
        content = text.encode() if isinstance(text, str) else text
        file = await self.library.add_file(self.tenant, name, "assistants", content)
        wanted = Attachment(file.id, attributes or {}, chunking, replaces)
        await self.library.attach(self.tenant, collection_id, wanted)
        return file.id

    async def ingest_all(self) -> None:
        while await self.ingestor.run_one():
            pass

    async def search(self, collection_id: str, query: str, k: int = 5) -> list[str]:
        """The names of the files that are found, best first."""
        vectors, _ = await self.embedder.embed([query], urgent=True)
        found = await self.indexes.search((self.tenant, collection_id), vectors[0], query, k)
        return [each.passage.filename for each in found]

    async def collection(self, name: str = "c") -> str:
        return (await self.library.add_collection(self.tenant, name, "", {})).id

    async def member(self, collection_id: str, file_id: str) -> CollectionFile:
        return await self.library.member(self.tenant, collection_id, file_id)

    async def keys(self, pattern: str) -> list[str]:
        return sorted(await self.commands.texts("KEYS", f"rg:{self.tenant}:{pattern}"))


Parts = RetrievalParts[HashingEmbedder]


@asynccontextmanager
async def retrieval_parts(store_url: str, tenant: str, embedder: E) -> AsyncIterator[RetrievalParts[E]]:
    async with Redis.from_url(store_url) as redis_client:
        commands = RedisCommands(redis_client)
        library = Library(commands)
        tokenizer = byte_tokenizer()
        model = ModelTokenizer(
            "bytes", tokenizer.to_str().encode(), lambda text: pack_tokens(tokenizer.encode(text).ids)
        )

        async def current() -> ModelTokenizer:
            return model

        parser = ParserProcess(timeout_seconds=30, memory_bytes=2 << 30)
        ingestor = Ingestor(library, parser, embedder, current)
        indexes = SearchIndexes(library, commands, embedder)
        try:
            yield RetrievalParts(redis_client, commands, library, ingestor, indexes, embedder, tenant)
        finally:
            await ingestor.close()
            await indexes.close()


@pytest_asyncio.fixture
async def parts(store_url: str) -> AsyncIterator[Parts]:
    async with Redis.from_url(store_url) as client:
        await client.flushall()
    async with retrieval_parts(store_url, f"t-{uuid.uuid4().hex[:8]}", HashingEmbedder()) as built:
        yield built


def license_text(name: str) -> str:
    """Real text that every Debian has."""
    return (Path("/usr/share/common-licenses") / name).read_text()
