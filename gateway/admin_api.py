"""/admin/v1: tenants, keys, limits, published texts, usage, cache, audit log.

operator       everything
tenant-admin   its own tenant: look, and manage keys; every other tenant's id answers 404, as if it were not there
user           403, whatever is asked for
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from litestar import Response, Router, delete, get, patch, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from msgspec import Meta

from engine.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from engine.protocol import EvictionLine, OwnerUse, evictions_seen_by
from gateway.audit_log import Actor, AuditEntry
from gateway.auth import role_guard, tenant_guard
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, json_response, raw_body, whole_number
from gateway.json_body import json_object, refuse_field
from gateway.request_context import request_context
from gateway.tenant_admin import KeyDraft, NewKey, TenantAdmin, TenantDraft, TenantPatch
from gateway.tenant_records import KeyRecord, Kind, RateLimits, Role, SharePolicy, TenantRecord
from gateway.tenants import Caller, TenantDirectory
from gateway.usage_api import UsagePages, operator_usage_route
from retrieval import documents
from retrieval.documents import DocumentError

B = TypeVar("B")

_MAX_PAGE = 1000
_ENTRY_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,15})?")


class RotateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_seconds: Annotated[float, Meta(ge=0, le=90 * 86_400)] = 0.0


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: Annotated[str, Meta(min_length=1, max_length=1_000_000)]


class CollectionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    documents: list[object]


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is shown: never itself, never its hash."""

    id: str
    tenant_id: str
    name: str
    role: Role
    last_four: str
    created_at: int
    expires_at: float | None
    revoked_at: float | None
    rotated_to: str | None

    @classmethod
    def of(cls, key: KeyRecord) -> KeyView:
        return cls(**{name: getattr(key, name) for name in cls.__struct_fields__})


class NewKeyView(msgspec.Struct, frozen=True, kw_only=True):
    key: KeyView
    api_key: str  # shown this once

    @classmethod
    def of(cls, new: NewKey) -> NewKeyView:
        return cls(key=KeyView.of(new.record), api_key=new.api_key)


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    limits: RateLimits
    policy: SharePolicy


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of blocks. A tenant's admin sees its own owner's lines, and who pressed only when it was itself."""

    block_size: int
    num_blocks: int | None
    owners: tuple[OwnerUse, ...]
    evictions: tuple[EvictionLine, ...]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: tuple[TenantRecord | KeyView | AuditEntry | PublishedView, ...]
    has_more: bool = False


class PublishedView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created_at: int
    text: str | None = None  # of a prompt
    num_documents: int | None = None  # of a collection


def admin_router(tenants: TenantDirectory, admin: TenantAdmin, engine: Engine, usage: UsagePages) -> Router:
    return Router(
        "/admin/v1",
        guards=[tenant_guard(tenants), role_guard(Role.TENANT_ADMIN, Role.OPERATOR)],
        route_handlers=[
            *_tenant_routes(admin),
            *_key_routes(admin),
            *_published_routes(tenants, admin),
            *_report_routes(admin, engine),
            operator_usage_route(usage),
        ],
    )


# ---------------------------------------------------------------- who may


def _caller(request: HttpRequest) -> Caller:
    caller = request_context(request.scope).caller
    assert caller is not None, "the router is behind tenant_guard"
    return caller


def _actor(request: HttpRequest) -> Actor:
    caller = _caller(request)
    return Actor(name=caller.key.id, tenant_id=caller.tenant.id, request_id=request_context(request.scope).request_id)


def _require_reach(request: HttpRequest, tenant_id: str) -> None:
    """Another tenant looks to a tenant's admin like one that is not there."""
    caller = _caller(request)
    if caller.key.role is not Role.OPERATOR and caller.tenant.id != tenant_id:
        raise NotFoundError(f"There is no tenant `{tenant_id[:64]}`.")


def _require_operator(request: HttpRequest) -> None:
    if _caller(request).key.role is not Role.OPERATOR:
        raise PermissionDeniedError("This is for operator keys.")


def _require_role_below(request: HttpRequest, role: Role) -> None:
    """Who may make, or renew, an operator's key is an operator."""
    if role is Role.OPERATOR:
        _require_operator(request)


# ---------------------------------------------------------------- bodies


async def _body(request: HttpRequest, body_type: type[B]) -> B:
    fields = json_object(await raw_body(request), request.headers.get("content-type", ""))
    try:
        return msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        refuse_field(error)


def _query(request: HttpRequest, known: Mapping[str, str]) -> dict[str, str]:
    """The query's parameters, once each; an unknown one is a 400. `known`: name → default."""
    found = dict(known)
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise InvalidRequestError(f"Unknown query parameter `{name[:64]}`.", param=name[:64])
        found[name] = str(value)
    return found


# ---------------------------------------------------------------- tenants


def _tenant_routes(admin: TenantAdmin) -> list[HTTPRouteHandler]:
    @get("/tenants")
    async def list_tenants(request: HttpRequest) -> Response[bytes]:
        caller = _caller(request)
        if caller.key.role is Role.OPERATOR:
            return json_response(Page(data=tuple(await admin.tenants())))
        return json_response(Page(data=(await admin.tenant(caller.tenant.id),)))

    @post("/tenants")
    async def create_tenant(request: HttpRequest) -> Response[bytes]:
        _require_operator(request)
        draft = await _body(request, TenantDraft)
        return json_response(await admin.create_tenant(_actor(request), draft), status=201)

    @get("/tenants/{tenant_id:str}")
    async def get_tenant(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        return json_response(await admin.tenant(tenant_id))

    @patch("/tenants/{tenant_id:str}")
    async def update_tenant(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        _require_operator(request)
        change = await _body(request, TenantPatch)
        return json_response(await admin.update_tenant(_actor(request), tenant_id, change))

    @get("/tenants/{tenant_id:str}/limits")
    async def get_limits(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        record = await admin.tenant(tenant_id)
        return json_response(LimitsView(limits=record.limits, policy=record.policy))

    @put("/tenants/{tenant_id:str}/limits")
    async def put_limits(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        _require_operator(request)
        limits = await _body(request, RateLimits)
        record = await admin.update_tenant(_actor(request), tenant_id, TenantPatch(limits=limits))
        return json_response(LimitsView(limits=record.limits, policy=record.policy))

    return [list_tenants, create_tenant, get_tenant, update_tenant, get_limits, put_limits]


# ---------------------------------------------------------------- keys


def _key_routes(admin: TenantAdmin) -> list[HTTPRouteHandler]:
    @get("/tenants/{tenant_id:str}/keys")
    async def list_keys(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        await admin.tenant(tenant_id)
        return json_response(Page(data=tuple(map(KeyView.of, await admin.keys(tenant_id)))))

    @post("/tenants/{tenant_id:str}/keys")
    async def create_key(request: HttpRequest, tenant_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        draft = await _body(request, KeyDraft)
        _require_role_below(request, draft.role)
        return json_response(NewKeyView.of(await admin.create_key(_actor(request), tenant_id, draft)), status=201)

    @get("/tenants/{tenant_id:str}/keys/{key_id:str}")
    async def get_key(request: HttpRequest, tenant_id: FromPath[str], key_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        return json_response(KeyView.of(await admin.key(tenant_id, key_id)))

    @post("/tenants/{tenant_id:str}/keys/{key_id:str}/rotate")
    async def rotate_key(request: HttpRequest, tenant_id: FromPath[str], key_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        body = await _body(request, RotateBody)
        _require_role_below(request, (await admin.key(tenant_id, key_id)).role)
        new = await admin.rotate_key(_actor(request), tenant_id, key_id, body.grace_seconds)
        return json_response(NewKeyView.of(new), status=201)

    @post("/tenants/{tenant_id:str}/keys/{key_id:str}/revoke", status_code=200)
    async def revoke_key(request: HttpRequest, tenant_id: FromPath[str], key_id: FromPath[str]) -> Response[bytes]:
        _require_reach(request, tenant_id)
        _require_role_below(request, (await admin.key(tenant_id, key_id)).role)
        return json_response(KeyView.of(await admin.revoke_key(_actor(request), tenant_id, key_id)))

    return [list_keys, create_key, get_key, rotate_key, revoke_key]


# ---------------------------------------------------------------- published texts


def _published_routes(tenants: TenantDirectory, admin: TenantAdmin) -> list[HTTPRouteHandler]:
    @get("/prompts")
    async def list_prompts(request: HttpRequest) -> Response[bytes]:
        prompts = tenants.published.prompts.values()
        views = [PublishedView(id=p.id, created_at=p.created_at, text=p.text) for p in prompts]
        return json_response(Page(data=tuple(views)))

    @put("/prompts/{prompt_id:str}")
    async def publish_prompt(request: HttpRequest, prompt_id: FromPath[str]) -> Response[bytes]:
        _require_operator(request)
        body = await _body(request, PromptBody)
        record = await admin.publish_prompt(_actor(request), _record_id(prompt_id), body.text)
        return json_response(PublishedView(id=record.id, created_at=record.created_at, text=record.text))

    @delete("/prompts/{prompt_id:str}", status_code=204)
    async def withdraw_prompt(request: HttpRequest, prompt_id: FromPath[str]) -> None:
        _require_operator(request)
        await admin.withdraw(_actor(request), Kind.PROMPTS, prompt_id)

    @get("/collections")
    async def list_collections(request: HttpRequest) -> Response[bytes]:
        found = tenants.published.collections.values()
        views = [PublishedView(id=c.id, created_at=c.created_at, num_documents=len(c.documents)) for c in found]
        return json_response(Page(data=tuple(views)))

    @put("/collections/{collection_id:str}")
    async def publish_collection(request: HttpRequest, collection_id: FromPath[str]) -> Response[bytes]:
        _require_operator(request)
        body = await _body(request, CollectionBody)
        try:
            texts = documents.parse(body.documents)
        except DocumentError as error:
            raise InvalidRequestError(f"{error.path}: {error.message}", param=error.path) from error
        record = await admin.publish_collection(_actor(request), _record_id(collection_id), texts)
        view = PublishedView(id=record.id, created_at=record.created_at, num_documents=len(record.documents))
        return json_response(view)

    @delete("/collections/{collection_id:str}", status_code=204)
    async def withdraw_collection(request: HttpRequest, collection_id: FromPath[str]) -> None:
        _require_operator(request)
        await admin.withdraw(_actor(request), Kind.COLLECTIONS, collection_id)

    return [
        list_prompts, publish_prompt, withdraw_prompt, list_collections, publish_collection, withdraw_collection,
    ]  # fmt: skip


def _record_id(text: str) -> str:
    try:
        return msgspec.convert(text, Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            "An id is 1 to 64 of A-Z a-z 0-9 . _ -, and begins with a letter or digit."
        ) from error


# ---------------------------------------------------------------- reports


def _report_routes(admin: TenantAdmin, engine: Engine) -> list[HTTPRouteHandler]:
    @get("/cache")
    async def get_cache(request: HttpRequest) -> Response[bytes]:
        caller = _caller(request)
        stats, info = await engine.stats(), engine.info
        block_size = info.block_size if info is not None else 0
        if caller.key.role is Role.OPERATOR:
            return json_response(
                CacheView(
                    block_size=block_size, num_blocks=stats.num_blocks, owners=stats.owners, evictions=stats.ledger
                )
            )
        own = caller.tenant.owner or caller.tenant.id
        return json_response(
            CacheView(
                block_size=block_size,
                num_blocks=None,
                owners=tuple(use for use in stats.owners if use.owner == own),
                evictions=evictions_seen_by(own, stats.ledger),
            )
        )

    @get("/audit")
    async def get_audit(request: HttpRequest) -> Response[bytes]:
        query = _query(request, {"limit": "100", "before": ""})
        before = query["before"]
        if before and not _ENTRY_ID.fullmatch(before):
            raise InvalidRequestError("`before` must be the id of an entry.", param="before")
        caller = _caller(request)
        own = None if caller.key.role is Role.OPERATOR else caller.tenant.id
        entries, more = await admin.log.page(own, whole_number(query["limit"], "limit", 1, _MAX_PAGE), before or None)
        return json_response(Page(data=tuple(entries), has_more=more))

    return [get_cache, get_audit]
