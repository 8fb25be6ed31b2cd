"""An HTTP request that asks something of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.http_io import HttpRequest, raw_body
from gateway.request_context import request_context
from gateway.request_timing import RequestTiming
from gateway.tenants import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    raw: bytes
    headers: Mapping[str, str]
    caller: Caller
    timing: RequestTiming

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def is_retry(self) -> bool:
        """The client says so."""
        return self.headers.get("x-stainless-retry-count", "0") not in ("", "0")


async def call_of(request: HttpRequest) -> Call:
    context = request_context(request.scope)
    assert context.caller is not None, "the route is behind tenant_guard"
    return Call(raw=await raw_body(request), headers=request.headers, caller=context.caller, timing=context.timing)
