"""Lists in pages, by OpenAI's parameters: `limit`, `order`, `after`, `before`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError
from gateway.json_body import convert_fields
from gateway.retrieval_types import Page

Item = TypeVar("Item")


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: str | None = None


Query = TypeVar("Query", bound=msgspec.Struct)


def read_query(parameters: Mapping[str, str], kind: type[Query]) -> Query:
    """Raises `RequestError`."""
    return convert_fields(dict(parameters), kind, strict=False)


def page(items: Sequence[Item], query: PageQuery, identity: Callable[[Item], str]) -> Page[Item]:
    """`items`: oldest first. Raises `InvalidRequestError` for a cursor that names none of them."""
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    ids = [identity(item) for item in ordered]
    start, end = 0, len(ordered)
    if query.after is not None:
        start = _place(ids, query.after, "after") + 1
    if query.before is not None:
        end = _place(ids, query.before, "before")
    # A page before something is the one that ends there.
    if query.before is not None and query.after is None:
        start = max(start, end - query.limit)
        more = start > 0
    else:
        more = end - start > query.limit
    chosen = tuple(ordered[start : min(end, start + query.limit)])
    return Page(
        data=chosen,
        first_id=identity(chosen[0]) if chosen else None,
        last_id=identity(chosen[-1]) if chosen else None,
        has_more=more,
    )


def _place(ids: Sequence[str], wanted: str, name: str) -> int:
    if wanted not in ids:
        raise InvalidRequestError(f"`{name}`: there is no {wanted[:100]!r} in this list.", param=name)
    return ids.index(wanted)
