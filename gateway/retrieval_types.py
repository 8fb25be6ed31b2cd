"""OpenAI's objects of files, vector stores and embeddings on the wire. What is ours is marked so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from gateway.openai_types import TokenUsage
from retrieval.collection_index import Found
from retrieval.records import (
    Attributes,
    BatchRecord,
    Chunking,
    CollectionFile,
    CollectionRecord,
    FileError,
    FileRecord,
    FileStatus,
)

Item = TypeVar("Item")


class Page(msgspec.Struct, Generic[Item], frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Item, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: None = None

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        return cls(
            id=record.id,
            bytes=record.num_bytes,
            created_at=record.created_at,
            filename=record.filename,
            purpose=record.purpose,
        )


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    deleted: Literal[True] = True
    # Ours: blocks of KV that went with it, in every tier; null when the engine could not be asked yet (it will be).
    erased_blocks: int | None


class FileCounts(msgspec.Struct, frozen=True, kw_only=True):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int

    @classmethod
    def of(cls, members: Sequence[CollectionFile]) -> FileCounts:
        states = [member.status for member in members]
        return cls(
            in_progress=states.count(FileStatus.IN_PROGRESS),
            completed=states.count(FileStatus.COMPLETED),
            failed=states.count(FileStatus.FAILED),
            cancelled=states.count(FileStatus.CANCELLED),
            total=len(states),
        )


class VectorStore(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store"] = "vector_store"
    created_at: int
    name: str
    description: str
    usage_bytes: int
    file_counts: FileCounts
    status: Literal["in_progress", "completed"]
    expires_after: None = None
    expires_at: None = None
    last_active_at: int
    metadata: dict[str, str]
    public: bool  # ours: readable by every tenant

    @classmethod
    def of(cls, record: CollectionRecord, members: Sequence[CollectionFile]) -> VectorStore:
        counts = FileCounts.of(members)
        return cls(
            id=record.id,
            created_at=record.created_at,
            name=record.name,
            description=record.description,
            usage_bytes=sum(member.usage_bytes for member in members),
            file_counts=counts,
            status="in_progress" if counts.in_progress else "completed",
            last_active_at=max([record.created_at, *(member.created_at for member in members)]),
            metadata=record.metadata,
            public=record.public,
        )


class StaticChunking(msgspec.Struct, frozen=True, kw_only=True):
    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class ChunkingObject(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["static"] = "static"
    static: StaticChunking

    @classmethod
    def of(cls, chunking: Chunking) -> ChunkingObject:
        static = StaticChunking(max_chunk_size_tokens=chunking.max_tokens, chunk_overlap_tokens=chunking.overlap_tokens)
        return cls(static=static)


class VectorStoreFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    created_at: int
    vector_store_id: str
    usage_bytes: int
    status: FileStatus
    last_error: FileError | None
    chunking_strategy: ChunkingObject
    attributes: Attributes

    @classmethod
    def of(cls, collection_id: str, member: CollectionFile) -> VectorStoreFile:
        return cls(
            id=member.file_id,
            created_at=member.created_at,
            vector_store_id=collection_id,
            usage_bytes=member.usage_bytes,
            status=member.status,
            last_error=member.error,
            chunking_strategy=ChunkingObject.of(member.chunking),
            attributes=member.attributes,
        )


class VectorStoreFileBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "cancelled", "failed"]
    file_counts: FileCounts

    @classmethod
    def of(cls, collection_id: str, batch: BatchRecord, members: Sequence[CollectionFile]) -> VectorStoreFileBatch:
        counts = FileCounts.of(members)
        return cls(
            id=batch.id,
            created_at=batch.created_at,
            vector_store_id=collection_id,
            status="cancelled" if batch.cancelled else "in_progress" if counts.in_progress else "completed",
            file_counts=counts,
        )


class TextContent(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    file_id: str
    filename: str
    score: float
    attributes: Attributes
    content: tuple[TextContent, ...]
    document_id: str  # ours: the passage as a document of the cache, and of a chat's citations

    @classmethod
    def of(cls, found: Found) -> SearchHit:
        return cls(
            file_id=found.passage.file_id,
            filename=found.passage.filename,
            score=found.score,
            attributes=found.attributes,
            content=(TextContent(text=found.passage.text),),
            document_id=found.passage.document_id,
        )


class SearchPage(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: tuple[str, ...]
    data: tuple[SearchHit, ...]
    has_more: Literal[False] = False
    next_page: None = None
    usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET  # ours: of the model, if it rewrote the query


class ContentPage(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    data: tuple[TextContent, ...]
    has_more: Literal[False] = False
    next_page: None = None


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of little-endian float32, if asked


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[EmbeddingObject, ...]
    model: str
    usage: EmbeddingUsage
