"""JSON bodies: read, and named by path where they are wrong.

Shared by all routes, so that every 400 of this server says the same kind of thing: what field, what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn, TypeVar, cast

import msgspec

from engine.errors import InvalidRequestError, RequestError, UnsupportedParameterError

# Of items in one array. A body of bytes alone could hold a million of them, and each costs time on the event loop.
MAX_ITEMS = 4096

Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(raw: bytes, content_type: str, kind: type[Body]) -> Body:
    """The body as `kind`, which forbids unknown fields; null means *not given*. Raises `RequestError`."""
    fields = json_object(raw, content_type) if raw else {}
    return convert_fields({name: value for name, value in fields.items() if value is not None}, kind)


def convert_fields(fields: Mapping[str, object], kind: type[Body], *, strict: bool = True) -> Body:
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        refuse_field(error)


def json_object(raw: bytes, content_type: str) -> dict[str, object]:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError("The body must be JSON, with `content-type: application/json`.")
    try:
        body = cast(object, msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("The body is nested too deeply.") from error
    return as_object(body, "The body")


def refuse_field(error: msgspec.ValidationError) -> NoReturn:
    """msgspec's sentence, "Expected `int`, got `str` - at `$.n`", as an error that names the field."""
    what, _, where = str(error).partition(" - at ")
    where = where.rpartition(" in ")[2]  # "`key` in `$.logit_bias`"
    path = where.strip("`").removeprefix("$").removeprefix(".")
    named = re.search(r"(?:required|unknown) field `(.*)`$", what)
    if named is not None:
        path = f"{path}.{named[1]}" if path else named[1]
    if "unknown field" in what:
        raise UnsupportedParameterError(f"`{path}` is not a parameter of this server.", param=path) from error
    raise InvalidRequestError(f"`{path}`: {what}.", param=path) from error


def check_count(items: list[object], path: str) -> None:
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(f"`{path}` has {len(items)} items; the most is {MAX_ITEMS}.", param=path)


def as_object(raw: object, path: str) -> dict[str, object]:
    if not isinstance(raw, Mapping):
        raise wrong_type(path, "an object", raw)
    return cast("dict[str, object]", raw)


def as_string(raw: object, path: str, expected: str = "a string") -> str:
    if not isinstance(raw, str):
        raise wrong_type(path, expected, raw)
    return raw


def wrong_type(path: str, expected: str, raw: object) -> RequestError:
    got = (
        "null or nothing"
        if raw is None
        else {"dict": "an object", "list": "an array", "str": "a string"}.get(
            type(raw).__name__, f"a {type(raw).__name__}"
        )
    )
    param = None if path == "The body" else path
    return InvalidRequestError(f"`{path}` must be {expected}, not {got}.", param=param)
