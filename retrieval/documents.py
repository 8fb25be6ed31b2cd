"""The documents of a request: two accepted shapes, one `Document`, one text.

    {"id"?: str, "title"?: str, "text": str}                  ours
    {"id"?: str, "data": {"title"?: …, "text" | "snippet": …, other: …}}     Cohere's; `data` may be a plain string

A document is labelled by its own id and title, never by its place among the others ("Document 1"): so its text,
and with it its token ids and its KV, is the same wherever it stands. `render` therefore sees one document alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

_LABEL_LENGTH = 200


class DocumentError(ValueError):
    """A document that cannot be read; `path` names the field, as in `documents[2].text`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str
    tokens: bytes = field(default=b"", compare=False, repr=False)  # packed ids of its rendering, if they are known
    is_public: bool = field(default=False, compare=False)  # found in a collection that everybody may read


def parse(raw: object, path: str = "documents") -> list[Document]:
    """Documents in either shape, in the given order. Raises `DocumentError`."""
    if not isinstance(raw, list):
        raise DocumentError(path, f"expected an array of documents, got {_type_name(raw)}")
    return [_parse_one(item, f"{path}[{i}]") for i, item in enumerate(cast("list[object]", raw))]


def render(document: Document) -> str:
    """The document as the model reads it: a label line, the text, an empty line."""
    title = _one_line(document.title)
    if document.id == content_id(document.title, document.text):
        label = title or f"[{document.id}]"
    else:
        label = f"[{_one_line(document.id)}] {title}".rstrip()
    return f"{label}\n{document.text.strip()}\n\n"


def content_id(title: str, text: str) -> str:
    """The id of a document that came without one: the same content, the same id."""
    digest = hashlib.blake2b(f"{len(title)}:{title}{text}".encode(), digest_size=8)
    return f"doc-{digest.hexdigest()}"


def _parse_one(raw: object, path: str) -> Document:
    fields = _object(raw, path)
    shape = ("id", "data") if "data" in fields else ("id", "title", "text")
    for name in fields:
        if name not in shape:
            raise DocumentError(f"{path}.{name}", f"unknown field; a document has {', '.join(shape)}")
    if "data" in fields:
        title, text = _parse_data(fields["data"], f"{path}.data")
        text_path = f"{path}.data"
    else:
        title, text = _optional_string(fields, "title", path), _string(fields.get("text"), f"{path}.text")
        text_path = f"{path}.text"
    if not text.strip():
        raise DocumentError(text_path, "the document has no text")
    return Document(_optional_string(fields, "id", path) or content_id(title, text), title, text)


def _parse_data(raw: object, path: str) -> tuple[str, str]:
    """Title and text of Cohere's `data`; every field but the title and the text becomes a line above the text."""
    if isinstance(raw, str):
        return "", raw
    fields = dict(_object(raw, path))
    title = _optional_string(fields, "title", path)
    fields.pop("title", None)
    body_name = next((name for name in ("text", "snippet") if fields.get(name) is not None), None)
    body = _string(fields.pop(body_name), f"{path}.{body_name}") if body_name else ""
    lines = [f"{_one_line(name)}: {_scalar(value, f'{path}.{name}')}" for name, value in fields.items()]
    return title, "\n".join([*lines, body] if body else lines)


def _object(raw: object, path: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise DocumentError(path, f"expected an object, got {_type_name(raw)}")
    return cast("dict[str, object]", raw)


def _string(raw: object, path: str) -> str:
    if not isinstance(raw, str):
        raise DocumentError(path, f"expected a string, got {_type_name(raw)}")
    return raw


def _optional_string(fields: Mapping[str, object], name: str, path: str) -> str:
    value = fields.get(name)
    return "" if value is None else _string(value, f"{path}.{name}")


def _scalar(raw: object, path: str) -> str:
    if raw is None or isinstance(raw, dict | list):
        raise DocumentError(path, f"expected a string or a number, got {_type_name(cast('object', raw))}")
    return str(raw)


def _one_line(text: str) -> str:
    """A label must stay one line: a title with a line break could pass for the start of another document."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_LABEL_LENGTH]


def _type_name(raw: object) -> str:
    names = {"dict": "an object", "list": "an array", "str": "a string", "bool": "a boolean", "NoneType": "null"}
    return names.get(type(raw).__name__, "a number")
