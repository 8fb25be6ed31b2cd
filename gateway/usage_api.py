"""GET /v1/usage (the caller's own tenant) and GET /admin/v1/usage, in the shape of OpenAI's organization usage API.

start_time, end_time   Unix seconds; buckets begin at multiples of their width
bucket_width           1m, 1h, 1d
group_by               project_id (the tenant), api_key_id, model; also as group_by[]
project_ids, api_key_ids, models     only these
limit, page            buckets on a page; the next page's mark comes with this one
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from engine.errors import InvalidRequestError
from engine.settings import UsageSettings
from gateway.http_io import HttpRequest, json_response, whole_number
from gateway.request_context import request_context
from gateway.tenant_records import Role
from gateway.usage import CACHED_CLASSES, PROMPT_CLASSES, UsageReader, UsageRecorder, UsageRow

Group = Literal["project_id", "api_key_id", "model"]

GROUPS: tuple[Group, ...] = ("project_id", "api_key_id", "model")
_WIDTHS = {"1m": 60, "1h": 3600, "1d": 86_400}
_DEFAULT_BUCKETS = {"1m": 60, "1h": 24, "1d": 7}
_MAX_BUCKETS = {"1m": 1440, "1h": 168, "1d": 31}
_LISTS = ("group_by", "project_ids", "api_key_ids", "models")
_SINGLE = ("start_time", "end_time", "bucket_width", "limit", "page")


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """By which `saved_money` was computed."""

    per_million_tokens: float
    per_million_cached_tokens: float
    currency: str


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's fields first, then ours."""

    object: str = "organization.usage.completions.result"
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    user_id: None = None
    batch: None = None

    input_tokens_by_class: dict[str, int]
    num_retries: int
    num_aborted: int
    num_failed: int
    prefill_seconds_saved: float  # at the speed measured on the engine that served them
    money_saved: float


class UsageBucket(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "bucket"
    start_time: int
    end_time: int
    results: tuple[UsageResult, ...]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "page"
    data: tuple[UsageBucket, ...]
    has_more: bool
    next_page: str | None
    price: Price


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    end: int
    width: int
    limit: int
    group_by: tuple[Group, ...]
    tenant_ids: frozenset[str] | None  # None: all
    key_ids: frozenset[str]  # empty: all
    models: frozenset[str]


class UsagePages:
    def __init__(self, reader: UsageReader, recorder: UsageRecorder, settings: UsageSettings) -> None:
        self._reader = reader
        self._recorder = recorder
        self._price = Price(
            per_million_tokens=settings.price_per_million_tokens,
            per_million_cached_tokens=settings.price_per_million_cached_tokens,
            currency=settings.currency,
        )

    async def page(self, query: UsageQuery) -> UsagePage:
        await self._recorder.flush()  # who asks after its request's end finds it
        first = query.start // query.width * query.width
        stop = min(query.end, first + query.limit * query.width)
        rows = await self._reader.rows(query.start, stop, query.tenant_ids)
        rows = [
            row
            for row in rows
            if (not query.key_ids or row.bucket.key_id in query.key_ids)
            and (not query.models or row.bucket.model in query.models)
        ]
        has_more = stop < query.end
        return UsagePage(
            data=tuple(
                UsageBucket(start_time=at, end_time=at + query.width, results=self._results(rows, at, query))
                for at in range(first, stop, query.width)
            ),
            has_more=has_more,
            next_page=f"page_{stop}" if has_more else None,
            price=self._price,
        )

    def _results(self, rows: Iterable[UsageRow], start: int, query: UsageQuery) -> tuple[UsageResult, ...]:
        groups: dict[tuple[str | None, ...], Counter[str]] = {}
        for bucket, counts in rows:
            if start <= bucket.minute * 60 < start + query.width:
                values = {"project_id": bucket.tenant_id, "api_key_id": bucket.key_id, "model": bucket.model}
                key = tuple(values[group] if group in query.group_by else None for group in GROUPS)
                groups.setdefault(key, Counter()).update(counts)
        return tuple(self._result(key, counts) for key, counts in sorted(groups.items(), key=lambda item: str(item[0])))

    def _result(self, key: tuple[str | None, ...], counts: Counter[str]) -> UsageResult:
        classes = {name: counts[name] for name in PROMPT_CLASSES}
        total = sum(classes.values())
        cached = sum(classes[name] for name in CACHED_CLASSES)
        price = self._price
        project_id, api_key_id, model = key
        return UsageResult(
            input_tokens=total,
            input_cached_tokens=cached,
            input_uncached_tokens=total - cached,
            output_tokens=counts["output"],
            num_model_requests=counts["requests"],
            project_id=project_id,
            api_key_id=api_key_id,
            model=model,
            input_tokens_by_class=classes,
            num_retries=counts["retries"],
            num_aborted=counts["aborted"],
            num_failed=counts["failed"],
            prefill_seconds_saved=counts["saved_us"] / 1e6,
            money_saved=cached * (price.per_million_tokens - price.per_million_cached_tokens) / 1e6,
        )


def own_usage_route(usage: UsagePages) -> HTTPRouteHandler:
    @get("/usage")
    async def get_own_usage(request: HttpRequest) -> Response[bytes]:
        caller = request_context(request.scope).caller
        assert caller is not None, "the route is behind tenant_guard"
        return json_response(await usage.page(_query(request, caller.tenant.id)))

    return get_own_usage


def operator_usage_route(usage: UsagePages) -> HTTPRouteHandler:
    @get("/usage")
    async def get_usage(request: HttpRequest) -> Response[bytes]:
        caller = request_context(request.scope).caller
        assert caller is not None, "the route is behind tenant_guard"
        own = None if caller.key.role is Role.OPERATOR else caller.tenant.id
        return json_response(await usage.page(_query(request, own)))

    return get_usage


def _query(request: HttpRequest, own_tenant: str | None) -> UsageQuery:
    """`own_tenant`: the only one that may be asked for. Another's id matches nothing, as one that does not exist."""
    lists: dict[str, list[str]] = {name: [] for name in _LISTS}
    single: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        plain = name.removesuffix("[]")
        if plain in lists:
            lists[plain] += str(value).split(",")
        elif name in _SINGLE:
            single[name] = str(value)
        else:
            raise InvalidRequestError(f"Unknown query parameter `{name[:64]}`.", param=name[:64])
    width_name = single.get("bucket_width", "1d")
    if width_name not in _WIDTHS:
        raise InvalidRequestError(f"`bucket_width` must be one of {', '.join(_WIDTHS)}.", param="bucket_width")
    start, end = _times(single, _WIDTHS[width_name])
    limit = whole_number(single.get("limit", str(_DEFAULT_BUCKETS[width_name])), "limit", 1, _MAX_BUCKETS[width_name])
    asked = frozenset(lists["project_ids"])
    tenant_ids = asked or None if own_tenant is None else frozenset({own_tenant}) & (asked or {own_tenant})
    return UsageQuery(
        start=start,
        end=end,
        width=_WIDTHS[width_name],
        limit=limit,
        group_by=tuple(_group(name) for name in lists["group_by"]),
        tenant_ids=tenant_ids,
        key_ids=frozenset(lists["api_key_ids"]),
        models=frozenset(lists["models"]),
    )


def _times(single: dict[str, str], width: int) -> tuple[int, int]:
    now = int(time.time())
    latest = now // width * width + width
    if "start_time" not in single:
        raise InvalidRequestError("`start_time` (Unix seconds) is required.", param="start_time")
    start = whole_number(single["start_time"], "start_time", 0, 2**40)
    if "page" in single:
        start = whole_number(single["page"].removeprefix("page_"), "page", 0, 2**40)
    end = min(whole_number(single["end_time"], "end_time", 0, 2**40), latest) if "end_time" in single else latest
    if start >= end:
        raise InvalidRequestError("`start_time` must be before `end_time` and not in the future.", param="start_time")
    return start, end


def _group(name: str) -> Group:
    for group in GROUPS:
        if group == name:
            return group
    raise InvalidRequestError(f"`group_by` must be one of {', '.join(GROUPS)}.", param="group_by")
