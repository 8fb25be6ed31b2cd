"""/v1/vector_stores: collections of files."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from engine.errors import PermissionDeniedError
from gateway.http_io import HttpRequest, body_of, json_response, tenant_of
from gateway.paging import PageQuery, page, read_query
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import Deleted, VectorStore
from gateway.tenants import Tenant
from gateway.vector_store_requests import ChangeStore, CreateStore, as_chunking
from retrieval.library import Attachment
from retrieval.records import CollectionRecord


def vector_store_routes(retrieval: RetrievalService) -> list[HTTPRouteHandler]:
    library = retrieval.library

    async def as_object(owner: str, record: CollectionRecord) -> VectorStore:
        return VectorStore.of(record, await library.members(owner, record.id))

    @post("/vector_stores", status_code=200)
    async def create_vector_store(request: HttpRequest) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, CreateStore)
        _check_public(body.public, tenant, retrieval)
        chunking = as_chunking(body.chunking_strategy, retrieval.auto_chunking)
        for file_id in body.file_ids:
            await library.file(tenant.id, file_id)  # before anything is made
        record = await library.add_collection(tenant.id, body.name, body.description, body.metadata, public=body.public)
        for file_id in body.file_ids:
            await library.attach(tenant.id, record.id, Attachment(file_id, {}, chunking))
        retrieval.ingestor.wake()
        return json_response(await as_object(tenant.id, record))

    @get("/vector_stores")
    async def list_vector_stores(request: HttpRequest) -> Response[bytes]:
        tenant, query = tenant_of(request), read_query(request.query_params, PageQuery)
        records = page(await library.collections(tenant.id), query, lambda record: record.id)
        objects = [await as_object(tenant.id, record) for record in records.data]
        return json_response(msgspec.structs.replace(records, data=tuple(objects)))

    @get("/vector_stores/{store_id:str}")
    async def retrieve_vector_store(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        owner, collection_id = await retrieval.searcher.resolve(tenant_of(request).id, store_id)
        return json_response(await as_object(owner, await library.collection(owner, collection_id)))

    @post("/vector_stores/{store_id:str}", status_code=200)
    async def modify_vector_store(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, ChangeStore)
        _check_public(body.public, tenant, retrieval)
        record = await library.collection(tenant.id, store_id)
        changes = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        record = msgspec.structs.replace(record, **changes)
        await library.change_collection(tenant.id, record)
        return json_response(await as_object(tenant.id, record))

    @delete("/vector_stores/{store_id:str}", status_code=200)
    async def delete_vector_store(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        gone = await library.delete_collection(tenant.id, store_id)
        erased = await retrieval.erase(tenant, gone)
        return json_response(Deleted(id=store_id, object="vector_store.deleted", erased_blocks=erased))

    return [
        create_vector_store,
        list_vector_stores,
        retrieve_vector_store,
        modify_vector_store,
        delete_vector_store,
    ]


def _check_public(public: bool | None, tenant: Tenant, retrieval: RetrievalService) -> None:
    if public and not retrieval.is_operator(tenant.id):
        raise PermissionDeniedError("Only the operator's vector stores can be public.", param="public")
