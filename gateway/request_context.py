"""What is known of one HTTP request besides its body: id, tenant, and what the access log will say of it.

It lives in the ASGI scope, where litestar's hooks, guards and handlers and our own ASGI wrapper all find it.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import cast

from litestar.types import Message, Scope

from engine.protocol import Segment
from gateway.model_use import ModelUse
from gateway.request_timing import RequestTiming
from gateway.tenants import Caller, Tenant

# A client's id goes into our log: no line breaks, no unbounded length.
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_KEY = "radixgate"


@dataclass(slots=True)
class RequestContext:
    request_id: str
    tenant: Tenant | None = None
    caller: Caller | None = None
    answer: ModelUse | None = None  # once the engine has begun with it
    rewriting: ModelUse | None = None  # of its query
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])  # of its response
    outcome: str = ""  # an error code, or `disconnected`
    model: str = ""
    stream: bool = False
    segments: tuple[Segment, ...] = ()  # in the order of the prompt, once the account is there
    causes: tuple[str, ...] = ()  # codes of the hints why its prompt was computed
    timing: RequestTiming = field(default_factory=RequestTiming)


def request_context(scope: Scope) -> RequestContext:
    """The context of the request that this scope belongs to; the same object at every call."""
    state = cast("dict[str, object]", scope["state"])
    context = state.get(_KEY)
    if context is None:
        context = state[_KEY] = RequestContext(_request_id(scope))
    assert isinstance(context, RequestContext), "the key is ours"
    return context


async def add_request_id(message: Message, scope: Scope) -> None:
    """A litestar `before_send` hook: it also sees the responses that no handler made (404, 405, 413)."""
    if message["type"] == "http.response.start":
        context = request_context(scope)
        header = (b"x-request-id", context.request_id.encode("ascii"))
        message["headers"] = [*message["headers"], *context.headers, header]


def _request_id(scope: Scope) -> str:
    """The client's own when it is sane, else a new one."""
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return sent.decode("ascii") if _SANE_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
