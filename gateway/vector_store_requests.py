"""The bodies and parameters of /v1/vector_stores, and what they mean to the library."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError
from gateway.paging import PageQuery
from gateway.retrieval_request import NumResults, RankingOptions
from retrieval.library import Attachment
from retrieval.records import Attributes, AttributeValue, Chunking, FileStatus

_Key = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_Key, _Text], Meta(max_length=16)]
SentAttributes = Annotated[dict[_Key, _Text | float | bool], Meta(max_length=16)]
FileIds = Annotated[list[str], Meta(max_length=2000)]
Name = Annotated[str, Meta(max_length=256)]


class AutoChunking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="auto"):
    """The server's own strategy."""


class StaticFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0)]


class StaticChunkingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="static"):
    static: StaticFields


ChunkingStrategy = AutoChunking | StaticChunkingRequest


class CreateStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name = ""
    description: _Text = ""
    file_ids: FileIds = msgspec.field(default_factory=list[str])
    chunking_strategy: ChunkingStrategy = AutoChunking()
    metadata: Metadata = msgspec.field(default_factory=dict[str, str])
    public: bool = False  # ours


class ChangeStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name | None = None
    description: _Text | None = None
    metadata: Metadata | None = None
    public: bool | None = None  # ours


class AttachFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file_id: str
    attributes: SentAttributes = msgspec.field(default_factory=dict[str, AttributeValue])
    chunking_strategy: ChunkingStrategy = AutoChunking()
    replaces: str | None = None  # ours: the file that leaves when this one is ready

    def attachment(self, auto: Chunking) -> Attachment:
        chunking = as_chunking(self.chunking_strategy, auto)
        return Attachment(self.file_id, as_attributes(self.attributes), chunking, self.replaces)


class ChangeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    attributes: SentAttributes


class CreateBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file_ids: FileIds = msgspec.field(default_factory=list[str])
    files: Annotated[list[AttachFile], Meta(max_length=2000)] = msgspec.field(default_factory=list[AttachFile])
    attributes: SentAttributes = msgspec.field(default_factory=dict[str, AttributeValue])
    chunking_strategy: ChunkingStrategy = AutoChunking()

    def attachments(self, auto: Chunking) -> list[Attachment]:
        if bool(self.file_ids) == bool(self.files):
            raise InvalidRequestError("Give `file_ids`, or `files`, and at least one of them.", param="file_ids")
        if self.files:
            if self.attributes or not isinstance(self.chunking_strategy, AutoChunking):
                raise InvalidRequestError(
                    "With `files`, `attributes` and `chunking_strategy` are given for each file.", param="files"
                )
            return [file.attachment(auto) for file in self.files]
        chunking, attributes = as_chunking(self.chunking_strategy, auto), as_attributes(self.attributes)
        return [Attachment(file_id, attributes, chunking) for file_id in self.file_ids]


class SearchStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: Annotated[str, Meta(min_length=1)] | Annotated[list[str], Meta(min_length=1, max_length=8)]
    filters: dict[str, object] | None = None
    max_num_results: NumResults = 10
    ranking_options: RankingOptions = RankingOptions()
    rewrite_query: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.query,) if isinstance(self.query, str) else tuple(self.query)


class MemberQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    filter: FileStatus | None = None


def as_chunking(strategy: ChunkingStrategy, auto: Chunking) -> Chunking:
    if isinstance(strategy, AutoChunking):
        return auto
    static = strategy.static
    if static.chunk_overlap_tokens > static.max_chunk_size_tokens // 2:
        raise InvalidRequestError(
            "`chunking_strategy.static.chunk_overlap_tokens` must not be above half of `max_chunk_size_tokens`.",
            param="chunking_strategy.static.chunk_overlap_tokens",
        )
    return Chunking(max_tokens=static.max_chunk_size_tokens, overlap_tokens=static.chunk_overlap_tokens)


def as_attributes(sent: dict[str, AttributeValue]) -> Attributes:
    # JSON does not tell 1990 from 1990.0, and neither should what comes back from the store.
    return {key: value if isinstance(value, str | bool) else float(value) for key, value in sent.items()}
