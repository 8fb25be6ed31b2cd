"""Attribute filters, in OpenAI's shape, as a predicate.

    {"type": "eq" | "ne" | "gt" | "gte" | "lt" | "lte" | "in" | "nin", "key": …, "value": …}
    {"type": "and" | "or", "filters": […]}

A key that a file does not have equals nothing and compares with nothing; so only `ne` and `nin` let such a file pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import cast

from retrieval.errors import InvalidValueError
from retrieval.records import Attributes, AttributeValue

Predicate = Callable[[Attributes], bool]

_MAX_DEPTH = 8
_ORDERED: dict[str, Callable[[float, float], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def compile_filter(raw: object, path: str = "filters", depth: int = 0) -> Predicate:
    """Raises `InvalidValueError` with the path of what is wrong."""
    fields = _object(raw, path)
    kind = fields.get("type")
    if kind in ("and", "or"):
        return _compound(fields, kind == "and", path, depth)
    _only(fields, ("type", "key", "value"), path)
    key = _key(fields.get("key"), f"{path}.key")
    value, at = fields.get("value"), f"{path}.value"
    match kind:
        case "eq" | "ne":
            return _membership(key, [_scalar(value, at)], negated=kind == "ne")
        case "in" | "nin":
            return _membership(key, _scalars(value, at), negated=kind == "nin")
        case "gt" | "gte" | "lt" | "lte":
            return _comparison(key, _ORDERED[str(kind)], value, at)
        case _:
            raise InvalidValueError("must be one of eq, ne, gt, gte, lt, lte, in, nin, and, or", f"{path}.type")


def _compound(fields: Mapping[str, object], every: bool, path: str, depth: int) -> Predicate:
    _only(fields, ("type", "filters"), path)
    if depth >= _MAX_DEPTH:
        raise InvalidValueError(f"is nested more than {_MAX_DEPTH} deep", path)
    raw = fields.get("filters")
    if not isinstance(raw, list) or not raw:
        raise InvalidValueError("must be a non-empty array", f"{path}.filters")
    items = cast("list[object]", raw)
    parts = [compile_filter(item, f"{path}.filters[{i}]", depth + 1) for i, item in enumerate(items)]
    combine = all if every else any
    return lambda attributes: combine(part(attributes) for part in parts)


def _membership(key: str, choices: list[AttributeValue], *, negated: bool) -> Predicate:
    def holds(attributes: Attributes) -> bool:
        return (key in attributes and any(_equal(attributes[key], choice) for choice in choices)) != negated

    return holds


def _comparison(key: str, compare: Callable[[float, float], bool], value: object, path: str) -> Predicate:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError("must be a number", path)
    limit = float(value)

    def holds(attributes: Attributes) -> bool:
        found = attributes.get(key)
        return isinstance(found, int | float) and not isinstance(found, bool) and compare(float(found), limit)

    return holds


def _equal(left: AttributeValue, right: AttributeValue) -> bool:
    # True == 1 in Python; as attributes they are different things.
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _key(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidValueError("must be a string", path)
    return value


def _scalar(value: object, path: str) -> AttributeValue:
    if not isinstance(value, str | int | float):
        raise InvalidValueError("must be a string, a number or a boolean", path)
    return value


def _scalars(value: object, path: str) -> list[AttributeValue]:
    if not isinstance(value, list):
        raise InvalidValueError("must be an array", path)
    return [_scalar(item, f"{path}[{i}]") for i, item in enumerate(cast("list[object]", value))]


def _object(raw: object, path: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise InvalidValueError("must be an object", path)
    return cast("dict[str, object]", raw)


def _only(fields: Mapping[str, object], known: tuple[str, ...], path: str) -> None:
    for name in fields:
        if name not in known:
            raise InvalidValueError("is no field of a filter", f"{path}.{name}")
