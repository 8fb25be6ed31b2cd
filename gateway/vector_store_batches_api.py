"""/v1/vector_stores/{id}/file_batches: many files attached at once, and counted together."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.http_io import HttpRequest, body_of, json_response, tenant_of
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import VectorStoreFileBatch
from gateway.vector_store_files_api import POLL_HEADER, member_page
from gateway.vector_store_requests import CreateBatch
from retrieval.records import BatchRecord, CollectionFile, FileStatus


def vector_store_batch_routes(retrieval: RetrievalService) -> list[HTTPRouteHandler]:
    library = retrieval.library

    async def batch_members(tenant: str, store_id: str, batch: BatchRecord) -> list[CollectionFile]:
        members = {member.file_id: member for member in await library.members(tenant, store_id)}
        return [members[file_id] for file_id in batch.file_ids if file_id in members]

    async def as_batch(tenant: str, store_id: str, batch: BatchRecord) -> Response[bytes]:
        members = await batch_members(tenant, store_id, batch)
        return json_response(VectorStoreFileBatch.of(store_id, batch, members), POLL_HEADER)

    @post("/vector_stores/{store_id:str}/file_batches", status_code=200)
    async def create_batch(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, CreateBatch)
        batch = await library.add_batch(tenant.id, store_id, body.attachments(retrieval.auto_chunking))
        retrieval.ingestor.wake()
        return await as_batch(tenant.id, store_id, batch)

    @get("/vector_stores/{store_id:str}/file_batches/{batch_id:str}")
    async def retrieve_batch(request: HttpRequest, store_id: FromPath[str], batch_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        return await as_batch(tenant.id, store_id, await library.batch(tenant.id, store_id, batch_id))

    @post("/vector_stores/{store_id:str}/file_batches/{batch_id:str}/cancel", status_code=200)
    async def cancel_batch(request: HttpRequest, store_id: FromPath[str], batch_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        batch = await library.batch(tenant.id, store_id, batch_id)
        batch = msgspec.structs.replace(batch, cancelled=True)
        await library.put_batch(tenant.id, store_id, batch)
        for member in await batch_members(tenant.id, store_id, batch):
            if member.status is FileStatus.IN_PROGRESS and member.batch_id == batch.id:
                await library.change_member(tenant.id, store_id, member.file_id, {"status": FileStatus.CANCELLED})
        return await as_batch(tenant.id, store_id, batch)

    @get("/vector_stores/{store_id:str}/file_batches/{batch_id:str}/files")
    async def list_batch(request: HttpRequest, store_id: FromPath[str], batch_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        batch = await library.batch(tenant.id, store_id, batch_id)
        return member_page(request, store_id, await batch_members(tenant.id, store_id, batch))

    return [create_batch, retrieve_batch, cancel_batch, list_batch]
