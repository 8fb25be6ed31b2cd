"""/v1/files: what a tenant has uploaded."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from engine.errors import InvalidRequestError, UnsupportedParameterError
from gateway.http_io import HttpRequest, form_of, json_response, tenant_of
from gateway.json_body import convert_fields
from gateway.paging import PageQuery, page, read_query
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import Deleted, FileObject

Purpose = Literal["assistants", "user_data"]
_MAX_NAME = 255
_FORM_BYTES = 64 * 1024  # of a multipart form, besides the file


class UploadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    purpose: Purpose


class FileQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    purpose: Purpose | None = None


def file_routes(retrieval: RetrievalService) -> list[HTTPRouteHandler]:
    library = retrieval.library
    max_bytes = retrieval.settings.max_file_bytes

    @post("/files", status_code=200, request_max_body_size=max_bytes + _FORM_BYTES)
    async def upload_file(request: HttpRequest) -> Response[bytes]:
        file, fields = await _form(request)
        content = await file.read()
        if len(content) > max_bytes:
            raise InvalidRequestError(f"The file has {len(content)} bytes; the most is {max_bytes}.", param="file")
        if not content:
            raise InvalidRequestError("The file is empty.", param="file")
        name = _file_name(file.filename)
        record = await library.add_file(tenant_of(request).id, name, fields.purpose, content)
        return json_response(FileObject.of(record))

    @get("/files")
    async def list_files(request: HttpRequest) -> Response[bytes]:
        query = read_query(request.query_params, FileQuery)
        files = await library.files(tenant_of(request).id)
        wanted = [FileObject.of(file) for file in files if query.purpose in (None, file.purpose)]
        return json_response(page(wanted, query, lambda file: file.id))

    @get("/files/{file_id:str}")
    async def retrieve_file(request: HttpRequest, file_id: FromPath[str]) -> Response[bytes]:
        return json_response(FileObject.of(await library.file(tenant_of(request).id, file_id)))

    @get("/files/{file_id:str}/content")
    async def retrieve_file_content(request: HttpRequest, file_id: FromPath[str]) -> Response[bytes]:
        content = await library.file_bytes(tenant_of(request).id, file_id)
        # Never as anything that a browser would run: it is what somebody has uploaded.
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @delete("/files/{file_id:str}", status_code=200)
    async def delete_file(request: HttpRequest, file_id: FromPath[str]) -> Response[bytes]:
        tenant = tenant_of(request)
        gone = await library.delete_file(tenant.id, file_id)
        return json_response(Deleted(id=file_id, object="file", erased_blocks=await retrieval.erase(tenant, gone)))

    return [upload_file, list_files, retrieve_file, retrieve_file_content, delete_file]


async def _form(request: HttpRequest) -> tuple[UploadFile, UploadFields]:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError("The body must be `multipart/form-data` with `file` and `purpose`.")
    fields = await form_of(request)
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("`file` must be a file.", param="file")
    expiring = next((name for name in fields if name.startswith("expires_after")), None)
    if expiring is not None:
        raise UnsupportedParameterError("`expires_after` is not supported: files stay.", param="expires_after")
    return file, convert_fields(fields, UploadFields)


def _file_name(sent: str) -> str:
    """The last part of a path, as a line of text: it becomes the title of the file's passages."""
    name = PurePosixPath(sent.replace("\\", "/")).name
    name = "".join(char for char in name if char.isprintable()).strip()
    if not name:
        raise InvalidRequestError("`file` has no name.", param="file")
    return name[-_MAX_NAME:]
