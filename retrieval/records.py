"""What the store keeps of files, collections and chunks: plain records, JSON in Redis.

    tenant ─┬─ FileRecord (the original's bytes beside it)
            └─ CollectionRecord ── CollectionFile (one per file: status, attributes, chunk ids) ── Chunk …

A *collection* is what OpenAI's API calls a vector store. Chunks are a tenant's, not a collection's: the same text
in two collections is stored, tokenized and embedded once.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from retrieval.errors import FileErrorCode

AttributeValue = str | float | bool
Attributes = dict[str, AttributeValue]


class FileStatus(StrEnum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Chunking(msgspec.Struct, frozen=True, kw_only=True):
    """In tokens of the served model."""

    max_tokens: int
    overlap_tokens: int


class FileError(msgspec.Struct, frozen=True, kw_only=True):
    code: FileErrorCode
    message: str


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    filename: str
    num_bytes: int
    created_at: int
    purpose: str


class CollectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    description: str
    created_at: int
    metadata: dict[str, str]
    public: bool = False  # readable by every tenant; only the operator's collections can be


class CollectionFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as a member of a collection. `generation` tells one attachment from a later one of the same file."""

    file_id: str
    filename: str
    created_at: int
    generation: str
    status: FileStatus
    attributes: Attributes
    chunking: Chunking
    usage_bytes: int = 0
    chunk_ids: tuple[str, ...] = ()
    error: FileError | None = None
    replaces: str | None = None  # the file that leaves the collection in the moment in which this one enters
    batch_id: str | None = None

    def is_of_embedder(self, tag: str) -> bool:
        """Vectors of another embedder cannot be compared with its own; such a file is ingested again."""
        return all(each.startswith(f"{tag}:") for each in self.chunk_ids[:1])


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created_at: int
    file_ids: tuple[str, ...]
    cancelled: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A passage. Its id is its embedder's tag and its content's digest: the same text is the same chunk.

    The digest alone is the document's id for the model and for clients, whatever it was embedded with.
    """

    id: str
    title: str
    text: str
    vector: bytes  # float32, normalised
    tokens: bytes  # the rendered document's token ids, packed; of the tokenizer named by `tokenizer`
    tokenizer: str

    @property
    def document_id(self) -> str:
        return document_id_of(self.id)


def chunk_id(embedder_tag: str, document_id: str) -> str:
    return f"{embedder_tag}:{document_id}"


def document_id_of(chunk_id: str) -> str:
    return chunk_id.partition(":")[2]
