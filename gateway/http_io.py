"""What every route does with a request and an answer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
from litestar import Request, Response
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from litestar.types import HTTPResponseStartEvent, Send

from engine.errors import InvalidRequestError
from gateway.json_body import Body, read_body
from gateway.request_context import request_context
from gateway.tenants import Tenant

HttpRequest = Request[Any, Any, State]


def tenant_of(request: HttpRequest) -> Tenant:
    tenant = request_context(request.scope).tenant
    assert tenant is not None, "the route is behind tenant_guard"
    return tenant


async def raw_body(request: HttpRequest) -> bytes:
    with _client_may_leave():
        return await request.body()


async def form_of(request: HttpRequest) -> dict[str, object]:
    """The fields of a multipart body, files among them. Raises `InvalidRequestError`."""
    with _client_may_leave():
        form = await request.form()
    return dict(cast("list[tuple[str, object]]", form.multi_items()))


@contextmanager
def _client_may_leave() -> Generator[None]:
    try:
        yield
    except InternalServerException as error:
        # The framework's word for a client that left while it was sending: no fault of ours, and no one to tell.
        raise InvalidRequestError("The client left before its request was complete.") from error


async def body_of(request: HttpRequest, kind: type[Body]) -> Body:
    """Raises `RequestError`."""
    return read_body(await raw_body(request), request.headers.get("content-type", ""), kind)


def json_response(body: msgspec.Struct, headers: dict[str, str] | None = None, *, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


async def send_json(send: Send, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A whole answer, from inside an ASGI application."""
    length = str(len(body)).encode()
    start: HTTPResponseStartEvent = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json"), (b"content-length", length), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


def whole_number(text: str, name: str, least: int, most: int) -> int:
    """A query parameter's value. Raises `InvalidRequestError`. Python refuses to read thousands of digits at all."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        raise InvalidRequestError(f"`{name}` must be a whole number from {least} to {most}.", param=name)
    return int(text)
