"""/v1/cache/documents/{id}: a document as a unit of the cache.

`id` is a file's id, which means all its passages; a vector store's, which means all of its files (also those that come
later, if it is pinned); or one document's own, as a search and a chat name it, or as a client gave it. Only what lies
under the tenant's own scope is counted, in every tier, and warmed; deleting erases all of its KV, under whatever a
client has narrowed its scope to. To the operator, by its keys or its tenant, what is public belongs as well. The
document itself stays where it is: that is /v1/files' matter.
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from engine.errors import NotFoundError
from engine.protocol import DocumentUse, GetDocumentStats
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, json_response, tenant_of
from gateway.prompt_scopes import PUBLIC_OWNER
from gateway.request_context import request_context
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import Deleted
from gateway.tenant_records import Role
from gateway.tenants import Tenant
from retrieval.library import COLLECTION_PREFIX
from retrieval.records import chunk_id, document_id_of


class CachedDocument(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["cache.document"] = "cache.document"
    document_ids: tuple[str, ...]
    blocks: int
    bytes: int
    blocks_by_tier: dict[str, int]
    hits: int
    tokens_saved: int
    last_use: float | None  # Unix seconds
    pinned: bool


class WarmResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["cache.document.warming"] = "cache.document.warming"
    queued: int  # documents of this tenant that wait for the engine to be idle
    pinned: bool


class CacheDocuments:
    """What the ids of these routes mean."""

    def __init__(self, retrieval: RetrievalService) -> None:
        self._retrieval = retrieval

    async def chunk_ids(self, tenant: Tenant, document_id: str) -> list[str]:
        """The stored passages that are meant. Raises `NotFoundError`."""
        library = self._retrieval.library
        if document_id.startswith(COLLECTION_PREFIX):
            await library.collection(tenant.id, document_id)
            members = await library.members(tenant.id, document_id)
            return list(dict.fromkeys(each for member in members for each in member.chunk_ids))
        if document_id.startswith("file-"):
            found = [
                await library.find_member(tenant.id, collection_id, document_id)
                for collection_id in await library.file_collections(tenant.id, document_id)
            ]
            await library.file(tenant.id, document_id)
            return list(dict.fromkeys(each for member in found if member is not None for each in member.chunk_ids))
        info = await self._retrieval.embedder.wait_ready()
        chunks = await self._retrieval.library.chunks(tenant.id, [chunk_id(info.tag, document_id)])
        return [chunk.id for chunk in chunks]

    async def pinnable(self, tenant: Tenant, document_id: str) -> list[str]:
        """What is remembered of a pin: a collection's own id, for it may grow."""
        found = await self.stored(tenant, document_id)
        return [document_id] if document_id.startswith(COLLECTION_PREFIX) else found

    async def stored(self, tenant: Tenant, document_id: str) -> list[str]:
        if document_id.startswith(COLLECTION_PREFIX):
            return await self.chunk_ids(tenant, document_id)  # an empty one may be pinned, too
        found = await self.chunk_ids(tenant, document_id)
        if not found:
            raise NotFoundError(f"No such document: {document_id[:100]!r}.")
        return found

    async def documents_of(self, tenant: Tenant, document_id: str) -> tuple[str, ...]:
        """Ids as the engine knows them; a client's own document is known to nobody else."""
        found = await self.chunk_ids(tenant, document_id)
        return tuple(document_id_of(each) for each in found) or (document_id,)

    async def warm(self, tenant: Tenant, document_id: str, *, pinned: bool) -> WarmResult:
        found = await self.stored(tenant, document_id)
        queued = self._retrieval.prefill.offer(tenant.id, found, pinned=pinned)
        return WarmResult(id=document_id, queued=queued, pinned=pinned)


def cache_document_routes(retrieval: RetrievalService, engine: Engine, public: bytes) -> list[HTTPRouteHandler]:
    """`public`: the scope of what the operator has published."""
    documents = CacheDocuments(retrieval)

    def owns_public(request: HttpRequest) -> bool:
        caller = request_context(request.scope).caller
        return caller is not None and (caller.key.role is Role.OPERATOR or retrieval.is_operator(caller.tenant.id))

    @get("/cache/documents/{document_id:str}")
    async def retrieve(request: HttpRequest, document_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        ids = await documents.documents_of(tenant, document_id)
        scopes = (tenant.scope, public) if owns_public(request) else (tenant.scope,)
        asked = GetDocumentStats(query_id=uuid.uuid4().hex, scopes=scopes, document_ids=ids)
        uses = (await engine.document_stats(asked)).documents
        pins = {document_id_of(each) for each in await retrieval.pins.chunks(tenant.id)}
        if not uses and ids == (document_id,) and not await documents.chunk_ids(tenant, document_id):
            raise NotFoundError(f"No such document: {document_id[:100]!r}.")
        return json_response(_summary(document_id, ids, uses, pinned=bool(pins.intersection(ids))))

    @post("/cache/documents/{document_id:str}/pin", status_code=200)
    async def pin(request: HttpRequest, document_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        await retrieval.pins.add(tenant.id, await documents.pinnable(tenant, document_id))
        return json_response(await documents.warm(tenant, document_id, pinned=True))

    @post("/cache/documents/{document_id:str}/unpin", status_code=200)
    async def unpin(request: HttpRequest, document_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        await retrieval.pins.remove(tenant.id, await documents.pinnable(tenant, document_id))
        return json_response(WarmResult(id=document_id, queued=0, pinned=False))

    @post("/cache/documents/{document_id:str}/warm", status_code=200)
    async def warm_now(request: HttpRequest, document_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        pins = await retrieval.pins.chunks(tenant.id)
        found = await documents.stored(tenant, document_id)
        return json_response(await documents.warm(tenant, document_id, pinned=bool(pins.intersection(found))))

    @delete("/cache/documents/{document_id:str}", status_code=200)
    async def erase(request: HttpRequest, document_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        stored = await documents.chunk_ids(tenant, document_id)
        if stored and retrieval.is_operator(tenant.id):
            erased = await retrieval.erase(tenant, stored)
        else:
            ids = tuple(document_id_of(each) for each in stored) or (document_id,)
            owners = (tenant.owner or tenant.id, *((PUBLIC_OWNER,) if owns_public(request) else ()))
            counts = [await retrieval.erasure.erase(owner, ids) for owner in owners]
            erased = None if None in counts else sum(count for count in counts if count is not None)
        if erased == 0 and not stored:
            raise NotFoundError(f"No such document: {document_id[:100]!r}.")
        return json_response(Deleted(id=document_id, object="cache.document.deleted", erased_blocks=erased))

    return [retrieve, pin, unpin, warm_now, erase]


def _summary(document_id: str, ids: tuple[str, ...], uses: tuple[DocumentUse, ...], *, pinned: bool) -> CachedDocument:
    tiers: dict[str, int] = {}
    for use in uses:
        for tier, count in use.num_by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + count
    return CachedDocument(
        id=document_id,
        document_ids=ids,
        blocks=sum(use.num_blocks for use in uses),
        bytes=sum(use.num_bytes for use in uses),
        blocks_by_tier=tiers,
        hits=sum(use.hits for use in uses),
        tokens_saved=sum(use.tokens_saved for use in uses),
        last_use=max((use.last_use for use in uses), default=0.0) or None,
        pinned=pinned,
    )
