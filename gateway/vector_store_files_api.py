"""/v1/vector_stores/{id}/files: the files of a collection, and how far their ingestion is."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.http_io import HttpRequest, body_of, json_response, tenant_of
from gateway.paging import page, read_query
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import (
    ContentPage,
    Deleted,
    TextContent,
    VectorStoreFile,
)
from gateway.vector_store_requests import AttachFile, ChangeFile, MemberQuery, as_attributes
from retrieval.records import CollectionFile

# The SDK's own interval is a second; most files are done sooner.
POLL_HEADER = {"openai-poll-after-ms": "250"}


def member_page(request: HttpRequest, store_id: str, members: Sequence[CollectionFile]) -> Response[bytes]:
    """By the request's `filter` and paging parameters."""
    query = read_query(request.query_params, MemberQuery)
    wanted = [VectorStoreFile.of(store_id, each) for each in members if query.filter in (None, each.status)]
    return json_response(page(wanted, query, lambda file: file.id))


def vector_store_file_routes(retrieval: RetrievalService) -> list[HTTPRouteHandler]:
    library = retrieval.library

    @post("/vector_stores/{store_id:str}/files", status_code=200)
    async def attach_file(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, AttachFile)
        if body.replaces is not None:
            await library.member(tenant.id, store_id, body.replaces)
        await library.collection(tenant.id, store_id)
        member = await library.attach(tenant.id, store_id, body.attachment(retrieval.auto_chunking))
        retrieval.ingestor.wake()
        return json_response(VectorStoreFile.of(store_id, member), POLL_HEADER)

    @get("/vector_stores/{store_id:str}/files")
    async def list_files(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        await library.collection(tenant.id, store_id)
        return member_page(request, store_id, await library.members(tenant.id, store_id))

    @get("/vector_stores/{store_id:str}/files/{file_id:str}")
    async def retrieve_file(request: HttpRequest, store_id: FromPath[str], file_id: FromPath[str]) -> Response[bytes]:
        member = await library.member(tenant_of(request).id, store_id, file_id)
        return json_response(VectorStoreFile.of(store_id, member), POLL_HEADER)

    @post("/vector_stores/{store_id:str}/files/{file_id:str}", status_code=200)
    async def modify_file(request: HttpRequest, store_id: FromPath[str], file_id: FromPath[str]) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, ChangeFile)
        await library.member(tenant.id, store_id, file_id)
        change = {"attributes": as_attributes(body.attributes)}
        member = await library.change_member(tenant.id, store_id, file_id, change)
        return json_response(VectorStoreFile.of(store_id, member))

    @delete("/vector_stores/{store_id:str}/files/{file_id:str}", status_code=200)
    async def detach_file(request: HttpRequest, store_id: FromPath[str], file_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        gone = await library.remove(tenant.id, store_id, file_id)
        erased = await retrieval.erase(tenant, gone)
        return json_response(Deleted(id=file_id, object="vector_store.file.deleted", erased_blocks=erased))

    @get("/vector_stores/{store_id:str}/files/{file_id:str}/content")
    async def file_content(request: HttpRequest, store_id: FromPath[str], file_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        member = await library.member(tenant.id, store_id, file_id)
        chunks = await library.chunks(tenant.id, member.chunk_ids)
        return json_response(ContentPage(data=tuple(TextContent(text=chunk.text) for chunk in chunks)))

    return [attach_file, list_files, retrieve_file, modify_file, detach_file, file_content]
